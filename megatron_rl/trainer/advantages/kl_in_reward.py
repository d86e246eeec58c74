"""The KL to the reference policy if it is taken from the reward (``reference.kl_in=reward``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from megatron_rl.algorithm.estimators import GroupRewards
from megatron_rl.algorithm.finite import require_finite
from megatron_rl.algorithm.flat import sum_per_sample
from megatron_rl.algorithm.kl import kl_penalty_per_token
from megatron_rl.rollout.training_batch import ScoredBatch
from megatron_rl.trainer.advantages.source import MeasuredKL
from megatron_rl.trainer.passes.passes import Passes

_WAY_OUT = (
    "reference.kl_in=reward takes it off the total: look at loss.kl_coefficient, loss.kl_estimator and how far the "
    "policy has gone from its reference"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KLPenalty:
    """Holds the amounts that the KL takes from the rewards of a rollout.

    of_token: float64 [T] flat, β·kl_t; 0 for a token that carries no loss.
    measured: Σ kl_t over the loss tokens.
    metrics:  ``reward/kl_penalty``.
    """

    of_token: np.ndarray
    measured: MeasuredKL
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class KLInReward:
    """Takes β times the KL of each token from the reward.

    estimator:   ``loss.kl_estimator``.
    coefficient: returns β of the rollout that is now trained.
    """

    estimator: str
    coefficient: Callable[[], float]

    def of(self, passes: Passes, num_samples: int) -> KLPenalty:
        """Return the penalty of a rollout. ``passes``: hold log π_old and log π_ref of every sample."""
        mask, coefficient = passes.loss_mask, self.coefficient()
        kl_T = np.where(mask, kl_penalty_per_token(passes.old.flat, passes.reference, self.estimator), 0.0)
        total = float(kl_T.sum())
        return KLPenalty(
            of_token=coefficient * kl_T,
            measured=MeasuredKL(kl=total, tokens=int(mask.sum())),
            metrics={"reward/kl_penalty": coefficient * total / max(num_samples, 1)},
        )

    @staticmethod
    def less(scored: ScoredBatch, penalty: KLPenalty, loss_mask: np.ndarray) -> GroupRewards:
        """Return the rewards after each sample's penalty, summed over its loss tokens, is taken from its total."""
        facts = scored.facts
        penalty_S = sum_per_sample(np.where(loss_mask, penalty.of_token, 0.0), facts.response_tokens)
        require_finite(penalty_S, "the KL in the reward", facts.sample_ids, _WAY_OUT)
        return dataclasses.replace(scored.rewards, totals=scored.rewards.totals - penalty_S)

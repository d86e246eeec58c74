"""The KL penalty to the reference policy that is subtracted from the rewards (``reference.kl_in=reward``)."""

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
    """Holds the KL penalties of one rollout, which are subtracted from its rewards.

    of_token: float64 [T], one number for each response token, sample after sample: β times the
              token's KL, 0 for a token without loss.
    measured: the sum of the KL over loss tokens, without β, and the number of these tokens.
    metrics:  ``reward/kl_penalty``, the mean penalty of a sample.
    """

    of_token: np.ndarray
    measured: MeasuredKL
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class KLInReward:
    """Computes the KL penalty of each token, β times its KL, and subtracts it from the rewards.

    estimator:   the name of the KL estimator, ``loss.kl_estimator``.
    coefficient: a function that returns β of the rollout that is being trained.
    """

    estimator: str
    coefficient: Callable[[], float]

    def of(self, passes: Passes, num_samples: int) -> KLPenalty:
        """Return the KL penalties of a rollout.

        passes: holds log π_old and log π_ref of every sample.
        num_samples: the number of the rollout's samples.
        """
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
        """Return the rollout's rewards, each sample's total reduced by the sum of its loss tokens' penalties.

        scored: the rollout's samples with their rewards.
        loss_mask: bool [T], the response tokens that carry loss, sample after sample.
        """
        facts = scored.facts
        penalty_S = sum_per_sample(np.where(loss_mask, penalty.of_token, 0.0), facts.response_tokens)
        require_finite(penalty_S, "the KL in the reward", facts.sample_ids, _WAY_OUT)
        return dataclasses.replace(scored.rewards, totals=scored.rewards.totals - penalty_S)

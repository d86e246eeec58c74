"""A rollout's advantages where rewards alone do not give them: GAE by the critic's values, and rewards less a KL to the reference.

Every rank computes them from the same numbers; rank 0's are everyone's all the same, so that no rounding of another CPU can cut another
plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_rl.algorithm.advantage import advantages
from megatron_rl.algorithm.gae import generalised_advantages, token_rewards, whiten_tokens
from megatron_rl.algorithm.kl import kl_penalty_per_token
from megatron_rl.config import Config
from megatron_rl.distributed import collectives
from megatron_rl.types import Advantages, BatchFacts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdvantageResult:
    """advantages: what the policy trains on · values float32, returns float64 [T] flat: what the critic trains on; None without one."""

    advantages: Advantages
    values: np.ndarray | None = None
    returns: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KLPenalty:
    """The KL in the reward. old, reference: float32 [T] flat, log π_old and log π_ref of every sample, for which they had to be passed ·
    penalties: float64 [T], β·kl_t · kl: Σ kl_t over ``tokens`` loss tokens, nats · metrics: of the pass of ``old``, and of the penalty."""

    old: np.ndarray
    reference: np.ndarray
    penalties: np.ndarray
    kl: float
    tokens: int
    metrics: Mapping[str, float]


def kl_penalty(
    old: np.ndarray, reference: np.ndarray, loss_mask: np.ndarray, *, estimator: str, coefficient: float, num_samples: int,
    metrics: Mapping[str, float],
) -> KLPenalty:  # fmt: skip
    """old, reference float32 [T] flat log-probs of all samples · loss_mask bool [T] · metrics: of the pass that gave ``old``."""
    per_token = np.where(loss_mask, kl_penalty_per_token(old, reference, estimator), 0.0)
    total = float(per_token.sum())
    said = {**metrics, "reward/kl_penalty": coefficient * total / max(num_samples, 1)}
    return KLPenalty(old=old, reference=reference, penalties=coefficient * per_token, kl=total, tokens=int(loss_mask.sum()), metrics=said)


def group_estimate(config: Config, facts: BatchFacts, totals: np.ndarray, penalties: np.ndarray, loss_mask: np.ndarray) -> AdvantageResult:
    """Any estimator over groups but ``gdpo``, of each sample's total less the sum of its loss tokens' penalties. A collective.

    totals [S], NaN where excluded · penalties [T] flat, β·kl_t · loss_mask bool [T].
    """
    owner = np.repeat(np.arange(facts.num_samples), facts.response_tokens)
    paid = np.bincount(owner, weights=np.where(loss_mask, penalties, 0.0), minlength=facts.num_samples)
    given = config.advantage
    values = advantages(
        totals - paid, facts.groups, ~np.isnan(totals), estimator=given.estimator, epsilon=given.epsilon, whiten=given.whiten,
        loss_tokens=facts.loss_tokens, sample_ids=facts.sample_ids,
    )  # fmt: skip
    return AdvantageResult(advantages=Advantages(of_sample=collectives.broadcast_from_rank0(values)))


def critic_estimate(
    config: Config, facts: BatchFacts, totals: np.ndarray, values: np.ndarray, penalties: np.ndarray | None, loss_mask: np.ndarray
) -> AdvantageResult:
    """``gae``. A collective. values float32 [T] flat, the critic's · the rest as of ``group_estimate``, penalties None for none."""
    given = config.advantage
    rewards = token_rewards(totals, loss_mask, facts.response_tokens, penalties)
    plain, returns = generalised_advantages(
        rewards, values, loss_mask, facts.response_tokens, gamma=given.gamma, lam=given.lam, sample_ids=facts.sample_ids
    )
    of_token = collectives.broadcast_from_rank0(whiten_tokens(plain, loss_mask, given.whiten, given.epsilon))
    owner = np.repeat(np.arange(facts.num_samples), facts.response_tokens)
    of_sample = np.bincount(owner, weights=of_token, minlength=facts.num_samples) / np.maximum(facts.loss_tokens, 1)
    whole = Advantages(of_sample=of_sample, of_token=of_token)
    return AdvantageResult(advantages=whole, values=values, returns=collectives.broadcast_from_rank0(returns))

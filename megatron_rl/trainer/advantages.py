"""The advantages of a rollout, computed here alone from rewards, the critic's values and a KL in the reward.

Every rank computes them from the same numbers. Where exp or log took part, every rank takes rank 0's result, so that
another CPU's rounding cannot give another plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_rl.algorithm.advantage import advantages
from megatron_rl.algorithm.distillation import distillation_advantages
from megatron_rl.algorithm.finite import require_finite
from megatron_rl.algorithm.flat import sum_per_sample
from megatron_rl.algorithm.gae import generalised_advantages, token_rewards, whiten_tokens
from megatron_rl.algorithm.kl import kl_penalty_per_token
from megatron_rl.algorithm.noise import with_noise
from megatron_rl.algorithm.signal import has_signal
from megatron_rl.backend.routed_rows import RecordedExperts
from megatron_rl.config import Config
from megatron_rl.distributed import collectives
from megatron_rl.rollout.training_batch import ScoredBatch
from megatron_rl.types import Advantages
from megatron_rl.users_code import is_own

_KL_IN_REWARD = (
    "reference.kl_in=reward takes it off the total: look at loss.kl_coefficient, loss.kl_estimator and how far the "
    "policy has gone from its reference"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KLPenalty:
    """Holds the KL to the reference policy where it is taken from the reward (``reference.kl_in=reward``).

    old:       float32 [T] flat, log π_old of every sample.
    reference: float32 [T] flat, log π_ref of every sample.
    penalties: float64 [T] flat, β·kl_t.
    kl:        Σ kl_t in nats, over the loss tokens.
    tokens:    the number of loss tokens.
    metrics:   of the pass that gave ``old``, and ``reward/kl_penalty``.
    experts:   of that pass, to be replayed; None where they are not.
    """

    old: np.ndarray
    reference: np.ndarray
    penalties: np.ndarray
    kl: float
    tokens: int
    metrics: Mapping[str, float]
    experts: RecordedExperts | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherGap:
    """Holds the student's log-probs that a teacher's were taken against (``advantage.estimator=distillation``).

    old:     float32 [T] flat, log π_old of every sample.
    metrics: of the pass that gave ``old``, and ``distillation/reverse_kl``.
    experts: of that pass, to be replayed; None where they are not.
    """

    old: np.ndarray
    metrics: Mapping[str, float]
    experts: RecordedExperts | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdvantageResult:
    """Holds the advantages of a rollout, and all values that were computed for them.

    advantages: the policy trains on them.
    plain:      float64 [S], by rewards alone and without noise; the replay buffer ranks groups by them. 0 where
                advantages depend on a critic's values or on a KL in the reward.
    values:     float32 [T] flat, the critic's; None without a critic.
    returns:    float64 [T] flat, the critic's targets; None without a critic.
    penalty:    None where no KL is in the reward.
    teacher:    None without a teacher.
    """

    advantages: Advantages
    plain: np.ndarray
    values: np.ndarray | None = None
    returns: np.ndarray | None = None
    penalty: KLPenalty | None = None
    teacher: TeacherGap | None = None


def kl_penalty(
    old: np.ndarray,
    reference: np.ndarray,
    loss_mask: np.ndarray,
    *,
    estimator: str,
    coefficient: float,
    num_samples: int,
    metrics: Mapping[str, float],
    experts: RecordedExperts | None = None,
) -> KLPenalty:
    """Return β times the KL of each token.

    old: float32 [T] flat, log π_old of all samples.
    reference: float32 [T] flat, log π_ref of all samples.
    loss_mask: bool [T].
    metrics, experts: of the pass that gave ``old``.
    """
    kl_T = np.where(loss_mask, kl_penalty_per_token(old, reference, estimator), 0.0)
    total = float(kl_T.sum())
    return KLPenalty(
        old=old,
        reference=reference,
        penalties=coefficient * kl_T,
        kl=total,
        tokens=int(loss_mask.sum()),
        metrics={**metrics, "reward/kl_penalty": coefficient * total / max(num_samples, 1)},
        experts=experts,
    )


def group_advantages(
    config: Config, scored: ScoredBatch, penalty: KLPenalty | None, loss_mask: np.ndarray | None, *, rl_step: int
) -> AdvantageResult:
    """Return the advantages of an estimator over groups. A collective with a penalty, with noise, or
    of an estimator of the user's own.

    penalty: its sum over a sample's loss tokens is taken from the sample's total reward; None without one.
    loss_mask: bool [T] flat; read only with a penalty.
    rl_step: optimizer steps of RL taken before, ghosts included. Below ``advantage.noise_steps`` of them, noise
        (algorithm/noise.py) is added in all mini-batches and epochs of the rollout that begins at this step.
    """
    settings, facts = config.advantage, scored.facts
    rewards, options = scored.rewards, {"epsilon": settings.epsilon, "whiten": settings.whiten}
    if is_own(settings.estimator):
        options |= {"arguments": settings.arguments, "moves_equal_rewards": settings.moves_equal_rewards}
    if penalty is not None:
        penalty_S = sum_per_sample(np.where(loss_mask, penalty.penalties, 0.0), facts.response_tokens)
        require_finite(penalty_S, "the KL in the reward", facts.sample_ids, _KL_IN_REWARD)
        rewards = dataclasses.replace(rewards, totals=rewards.totals - penalty_S)
        values = collectives.broadcast_from_rank0(advantages(rewards, estimator=settings.estimator, **options))
        return AdvantageResult(
            advantages=Advantages(of_sample=values), plain=np.zeros(facts.num_samples), penalty=penalty
        )
    plain = advantages(rewards, estimator=settings.estimator, **options)
    if is_own(settings.estimator):  # it may use exp or log
        plain = collectives.broadcast_from_rank0(plain)
    if not settings.noise_std or rl_step >= settings.noise_steps:
        return AdvantageResult(advantages=Advantages(of_sample=plain), plain=plain)
    signal = has_signal(
        plain, facts.loss_tokens, advantage_epsilon=config.skip.advantage_epsilon, sample_ids=facts.sample_ids
    )
    noisy = with_noise(plain, signal, facts.sample_ids, std=settings.noise_std, seed=config.run.seed)
    return AdvantageResult(advantages=Advantages(of_sample=collectives.broadcast_from_rank0(noisy)), plain=plain)


def critic_advantages(
    config: Config, scored: ScoredBatch, values: np.ndarray, penalty: KLPenalty | None, loss_mask: np.ndarray
) -> AdvantageResult:
    """Return the advantages of ``gae``. A collective.

    values: float32 [T] flat, the critic's values.
    loss_mask: bool [T] flat.
    """
    settings, facts = config.advantage, scored.facts
    penalties = None if penalty is None else penalty.penalties
    rewards = token_rewards(scored.rewards.totals, loss_mask, facts.response_tokens, penalties)
    plain, returns = generalised_advantages(
        rewards,
        values,
        loss_mask,
        facts.response_tokens,
        gamma=settings.gamma,
        lam=settings.lam,
        sample_ids=facts.sample_ids,
    )
    of_token = collectives.broadcast_from_rank0(whiten_tokens(plain, loss_mask, settings.whiten, settings.epsilon))
    of_sample = sum_per_sample(of_token, facts.response_tokens) / np.maximum(facts.loss_tokens, 1)
    return AdvantageResult(
        advantages=Advantages(of_sample=of_sample, of_token=of_token),
        plain=np.zeros(facts.num_samples),
        values=values,
        returns=collectives.broadcast_from_rank0(returns),
        penalty=penalty,
    )


def teacher_advantages(
    config: Config,
    scored: ScoredBatch,
    old: np.ndarray,
    teacher: np.ndarray,
    loss_mask: np.ndarray,
    metrics: Mapping[str, float],
    experts: RecordedExperts | None = None,
) -> AdvantageResult:
    """Return the advantages of ``distillation``. A collective.

    old, teacher: float32 [T] flat, the student's and the teacher's log-probs of every sample.
    loss_mask: bool [T] flat.
    metrics, experts: of the pass that gave ``old``.
    """
    facts = scored.facts
    plain = distillation_advantages(
        old,
        teacher,
        loss_mask,
        facts.response_tokens,
        discount=config.teacher.discount,
        sample_ids=facts.sample_ids,
    )
    of_token = collectives.broadcast_from_rank0(plain)
    gap = np.where(loss_mask, old.astype(np.float64) - teacher, 0.0)
    tokens = max(int(loss_mask.sum()), 1)
    return AdvantageResult(
        advantages=Advantages(
            of_sample=sum_per_sample(of_token, facts.response_tokens) / np.maximum(facts.loss_tokens, 1),
            of_token=of_token,
        ),
        plain=np.zeros(facts.num_samples),
        teacher=TeacherGap(
            old=old,
            metrics={**metrics, "distillation/reverse_kl": float(gap.sum()) / tokens},
            experts=experts,
        ),
    )

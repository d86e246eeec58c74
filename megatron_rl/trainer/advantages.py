"""The advantages of a rollout: the one place where rewards, the critic's values and a KL in the reward become
advantages.

Every rank computes them from the same numbers. Where exp or log took part, rank 0's are everyone's, so that no rounding
of another CPU can cut another plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_rl.algorithm.advantage import advantages
from megatron_rl.algorithm.gae import generalised_advantages, token_rewards, whiten_tokens
from megatron_rl.algorithm.kl import kl_penalty_per_token
from megatron_rl.algorithm.noise import with_noise
from megatron_rl.algorithm.signal import has_signal
from megatron_rl.config import Config
from megatron_rl.distributed import collectives
from megatron_rl.rollout.training_batch import ScoredBatch
from megatron_rl.types import Advantages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KLPenalty:
    """The KL to the reference policy, where it is taken from the reward (``reference.kl_in=reward``).

    old, reference: float32 [T] flat, log π_old and log π_ref of every sample.
    penalties:      float64 [T] flat, β·kl_t.
    kl, tokens:     Σ kl_t in nats, over so many loss tokens.
    metrics:        of the pass that gave ``old``, and ``reward/kl_penalty``.
    """

    old: np.ndarray
    reference: np.ndarray
    penalties: np.ndarray
    kl: float
    tokens: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdvantageResult:
    """Advantages of a rollout, and all that was computed for them.

    advantages: the policy trains on them.
    plain:      float64 [S], by rewards alone and without noise; the replay buffer ranks groups by them. 0 where
                advantages hang on a critic's values or on a KL in the reward.
    values, returns: float32 and float64 [T] flat, the critic trains on them; None without one.
    penalty:    None where no KL is in the reward.
    """

    advantages: Advantages
    plain: np.ndarray
    values: np.ndarray | None = None
    returns: np.ndarray | None = None
    penalty: KLPenalty | None = None


def kl_penalty(
    old: np.ndarray,
    reference: np.ndarray,
    loss_mask: np.ndarray,
    *,
    estimator: str,
    coefficient: float,
    num_samples: int,
    metrics: Mapping[str, float],
) -> KLPenalty:
    """Return β times the KL of each token.

    old, reference: float32 [T] flat, log-probs of all samples.
    loss_mask: bool [T].
    metrics: of the pass that gave ``old``.
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
    )


def group_advantages(
    config: Config, scored: ScoredBatch, penalty: KLPenalty | None, loss_mask: np.ndarray | None, *, rl_step: int
) -> AdvantageResult:
    """Return the advantages of an estimator over groups. A collective with a penalty or with noise.

    loss_mask: bool [T] flat; read where there is a penalty, which each sample's loss tokens take from its total reward.
    rl_step: optimizer steps of RL taken before, ghosts included. Noise (algorithm/noise.py) is added up to
        ``advantage.noise_steps`` of them, in all mini-batches and epochs of the rollout that begins there.
    """
    settings, facts = config.advantage, scored.facts
    rewards, options = scored.rewards, {"epsilon": settings.epsilon, "whiten": settings.whiten}
    if penalty is not None:
        owner = np.repeat(np.arange(facts.num_samples), facts.response_tokens)
        paid = np.bincount(owner, weights=np.where(loss_mask, penalty.penalties, 0.0), minlength=facts.num_samples)
        rewards = dataclasses.replace(rewards, totals=rewards.totals - paid)
        values = collectives.broadcast_from_rank0(advantages(rewards, estimator=settings.estimator, **options))
        return AdvantageResult(
            advantages=Advantages(of_sample=values), plain=np.zeros(facts.num_samples), penalty=penalty
        )
    plain = advantages(rewards, estimator=settings.estimator, **options)
    if not settings.noise_std or rl_step >= settings.noise_steps:
        return AdvantageResult(advantages=Advantages(of_sample=plain), plain=plain)
    signal = has_signal(plain, facts.loss_tokens, advantage_epsilon=config.skip.advantage_epsilon)
    noisy = with_noise(plain, signal, facts.sample_ids, std=settings.noise_std, seed=config.run.seed)
    return AdvantageResult(advantages=Advantages(of_sample=collectives.broadcast_from_rank0(noisy)), plain=plain)


def critic_advantages(
    config: Config, scored: ScoredBatch, values: np.ndarray, penalty: KLPenalty | None, loss_mask: np.ndarray
) -> AdvantageResult:
    """Return the advantages of ``gae``. A collective.

    values: float32 [T] flat, the critic's.
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
    owner = np.repeat(np.arange(facts.num_samples), facts.response_tokens)
    sums = np.bincount(owner, weights=of_token, minlength=facts.num_samples)
    of_sample = sums / np.maximum(facts.loss_tokens, 1)
    return AdvantageResult(
        advantages=Advantages(of_sample=of_sample, of_token=of_token),
        plain=np.zeros(facts.num_samples),
        values=values,
        returns=collectives.broadcast_from_rank0(returns),
        penalty=penalty,
    )

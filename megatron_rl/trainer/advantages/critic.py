"""Advantages of PPO: generalised advantage estimation over a critic's values (``advantage.estimator=gae``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.algorithm.flat import sum_per_sample
from megatron_rl.algorithm.gae import generalised_advantages, token_rewards, whiten_tokens
from megatron_rl.config import AdvantageConfig
from megatron_rl.distributed import collectives
from megatron_rl.rollout.training_batch import ScoredBatch
from megatron_rl.trainer.advantages.source import AdvantageResult, CriticTargets
from megatron_rl.trainer.passes.passes import Passes
from megatron_rl.types import Advantages

if TYPE_CHECKING:
    from megatron_rl.trainer.advantages.kl_in_reward import KLInReward


class CriticAdvantages:
    """Computes advantages by generalised advantage estimation, and the returns that the critic is trained on.

    kl: computes the KL penalty that is subtracted from each token's reward; None if the reward has
        no KL.
    """

    def __init__(self, settings: AdvantageConfig, *, kl: KLInReward | None = None) -> None:
        self.settings, self.kl = settings, kl

    def __call__(self, scored: ScoredBatch, passes: Passes) -> AdvantageResult:
        """Return the advantages of a rollout, and the critic's targets. A collective.

        scored: the rollout's samples with their rewards.
        passes: holds the critic's values; if the reward has a KL, log π_old and log π_ref too.
        """
        settings, facts, mask = self.settings, scored.facts, passes.loss_mask
        penalty = None if self.kl is None else self.kl.of(passes, facts.num_samples)
        rewards = token_rewards(
            scored.rewards.totals, mask, facts.response_tokens, None if penalty is None else penalty.of_token
        )
        plain, returns = generalised_advantages(
            rewards,
            passes.values,
            mask,
            facts.response_tokens,
            gamma=settings.gamma,
            lam=settings.lam,
            sample_ids=facts.sample_ids,
        )
        of_token = collectives.broadcast_from_rank0(whiten_tokens(plain, mask, settings.whiten, settings.epsilon))
        of_sample = sum_per_sample(of_token, facts.response_tokens) / np.maximum(facts.loss_tokens, 1)
        returns = collectives.broadcast_from_rank0(returns).astype(np.float32)
        return AdvantageResult(
            advantages=Advantages(of_sample=of_sample, of_token=of_token),
            plain=np.zeros(facts.num_samples),
            targets=CriticTargets(returns=returns, values=passes.values),
            kl=None if penalty is None else penalty.measured,
            metrics={} if penalty is None else penalty.metrics,
        )

"""Advantages by estimators that compare a prompt's samples, optionally with a KL in the reward, or with added noise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.algorithm.advantage import advantages
from megatron_rl.config import AdvantageConfig
from megatron_rl.distributed import collectives
from megatron_rl.rollout.training_batch import ScoredBatch
from megatron_rl.trainer.advantages.source import AdvantageResult
from megatron_rl.trainer.passes.passes import Passes
from megatron_rl.types import Advantages
from megatron_rl.users_code import is_own

if TYPE_CHECKING:
    from megatron_rl.algorithm.estimators import GroupRewards
    from megatron_rl.trainer.advantages.kl_in_reward import KLInReward
    from megatron_rl.trainer.advantages.noise import AdvantageNoise

EnterOwn = Callable[[str], contextlib.AbstractContextManager[None]]


class GroupAdvantages:
    """Computes advantages from the rewards of each prompt's samples, by a named estimator or the user's function.

    kl:        computes the KL penalty that is subtracted from each sample's total reward; None if
               the reward has no KL. With a KL, no noise is added.
    noise:     adds noise to the advantages in a run's first steps; None for no noise.
    enter_own: a function that returns a context, called with the name "advantage". The context is
               open during the computation, which may call a user's function.
    group_size: the mean number of samples of a group where groups may be unequal; None: groups are
               equal.
    """

    def __init__(
        self,
        settings: AdvantageConfig,
        *,
        kl: KLInReward | None = None,
        noise: AdvantageNoise | None = None,
        enter_own: EnterOwn = contextlib.nullcontext,
        group_size: int | None = None,
    ) -> None:
        self.group_size = group_size
        self.settings, self.kl, self.noise, self.enter_own = settings, kl, noise, enter_own
        self.is_own = is_own(settings.estimator)

    def __call__(self, scored: ScoredBatch, passes: Passes) -> AdvantageResult:
        """Return a rollout's advantages.

        A collective if the reward has a KL, if noise is added, or if the estimator is the user's function.

        scored: the rollout's samples with their rewards.
        passes: holds log π_old and log π_ref if the reward has a KL; otherwise it is not read.
        """
        with self.enter_own("advantage"):
            if self.kl is not None:
                return self._less_kl(self.kl, scored, passes)
            plain = self._estimate(scored.rewards)
            if self.is_own:  # the user's function may use exp or log
                plain = collectives.broadcast_from_rank0(plain)
            values = plain if self.noise is None else self.noise(plain, scored.facts)
            return AdvantageResult(advantages=Advantages(of_sample=values), plain=plain)

    def _less_kl(self, kl: KLInReward, scored: ScoredBatch, passes: Passes) -> AdvantageResult:
        penalty = kl.of(passes, scored.facts.num_samples)
        values = collectives.broadcast_from_rank0(self._estimate(kl.less(scored, penalty, passes.loss_mask)))
        return AdvantageResult(
            advantages=Advantages(of_sample=values),
            plain=np.zeros(scored.facts.num_samples),
            kl=penalty.measured,
            metrics=penalty.metrics,
        )

    def _estimate(self, rewards: GroupRewards) -> np.ndarray:
        settings = self.settings
        own = {"arguments": settings.arguments, "moves_equal_rewards": settings.moves_equal_rewards}
        return advantages(
            rewards,
            estimator=settings.estimator,
            epsilon=settings.epsilon,
            whiten=settings.whiten,
            group_size=self.group_size,
            **(own if self.is_own else {}),
        )

"""The factory of the objects that a run's loop calls; it imports only what the configuration chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.algorithm.signal import SignalRule
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.config import Config
from megatron_rl.distributed.watchdog import Watchdog
from megatron_rl.observability.timer import StepTimer
from megatron_rl.trainer.advantages.group import GroupAdvantages
from megatron_rl.trainer.advantages.source import AdvantageSource
from megatron_rl.trainer.critic_part import CriticPart, NoCritic, TrainedCritic
from megatron_rl.trainer.passes.gap_check import GapCheck, GapGuard
from megatron_rl.trainer.passes.old_logprobs import OldLogProbPass, OldPass, OldPassRules, needs_old_logprobs
from megatron_rl.trainer.passes.passes import FlatPass, Pass, PassesOfAdvantages
from megatron_rl.trainer.reference import NoReference, Reference
from megatron_rl.trainer.update import UpdatePlanner, UpdateRules
from megatron_rl.validate import objective, validate_config

if TYPE_CHECKING:
    from megatron_rl.critic import Critic, RemoteCritic
    from megatron_rl.trainer.advantages.kl_in_reward import KLInReward
    from megatron_rl.trainer.advantages.noise import AdvantageNoise


@dataclass(frozen=True, slots=True, kw_only=True)
class PartChooser:
    """Builds the objects that one run's loop calls, chosen by its configuration. Methods are collectives.

    rule: says which samples the run drops.
    """

    config: Config
    backend: MegatronBackend
    rule: SignalRule
    timer: StepTimer
    watchdog: Watchdog

    def reference(self) -> Reference:
        """Return the reference policy that a KL is measured against.

        If ``loss.kl_coefficient`` is 0, it is an object that keeps no weights and does nothing.
        Raises ConfigError if the section ``reference`` contradicts the loss or the estimator.
        """
        config = self.config
        validate_config(config, objective.reference)
        if config.loss.kl_coefficient == 0:
            return NoReference()
        from megatron_rl.trainer.reference_policy import ReferencePolicy

        return ReferencePolicy(config.loss, config.reference, self.backend)

    def critic(self, critic: Critic | RemoteCritic | None) -> CriticPart:
        """Return the object by which the loop trains ``critic``; without a critic its methods do nothing."""
        if critic is None:
            return NoCritic()
        return TrainedCritic(critic, self.timer, starts_as_policy=self.config.critic.init == "policy")

    def passes(
        self, critic: Critic | RemoteCritic | None, reference: Reference, old: OldLogProbPass
    ) -> PassesOfAdvantages:
        """Return the forward passes that the advantages need; load a teacher's weights if one is configured.

        reference, old: compute log π_ref and log π_old by forward passes.
        """
        config, timer = self.config, self.timer
        chosen: list[Pass] = []
        if config.kl_in_reward:
            chosen.append(OldPass(old=old, timer=timer, of_reference=reference.logprobs))
        match config.advantage.estimator:
            case "gae":
                enter = _measured(timer, "critic")
                chosen.append(FlatPass(name="values", compute=critic.values, enter=enter))
            case "distillation":
                from megatron_rl.trainer.passes.teacher import Teacher

                teacher, enter = (
                    Teacher(config.teacher, self.backend, config.run.deadline_s),
                    _measured(timer, "teacher"),
                )
                chosen.append(OldPass(old=old, timer=timer))
                chosen.append(FlatPass(name="teacher", compute=teacher.logprobs, enter=enter))
        if chosen:
            chosen.insert(0, FlatPass(name="loss_mask", compute=self.backend.gather_loss_mask))
        return PassesOfAdvantages(passes=tuple(chosen))

    def advantages(self, reference: Reference) -> AdvantageSource:
        """Return the object that computes advantages by ``advantage.estimator``."""
        config = self.config
        kl = self._kl_in_reward(reference)
        match config.advantage.estimator:
            case "gae":
                from megatron_rl.trainer.advantages.critic import CriticAdvantages

                return CriticAdvantages(config.advantage, kl=kl)
            case "distillation":
                from megatron_rl.trainer.advantages.teacher import TeacherAdvantages

                return TeacherAdvantages(discount=config.teacher.discount)
        noise = self._noise() if config.advantage.noise_std and kl is None else None
        return GroupAdvantages(
            config.advantage,
            kl=kl,
            noise=noise,
            enter_own=self.watchdog.own_code,
            group_size=config.rollout.unequal_group_size,
        )

    def _kl_in_reward(self, reference: Reference) -> KLInReward | None:
        if not self.config.kl_in_reward:
            return None
        from megatron_rl.trainer.advantages.kl_in_reward import KLInReward

        return KLInReward(estimator=self.config.loss.kl_estimator, coefficient=lambda: reference.coefficient)

    def _noise(self) -> AdvantageNoise:
        from megatron_rl.trainer.advantages.noise import AdvantageNoise

        config, backend = self.config, self.backend
        return AdvantageNoise(
            std=config.advantage.noise_std,
            steps=config.advantage.noise_steps,
            seed=config.run.seed,
            epsilon=config.skip.advantage_epsilon,
            rl_steps=lambda: backend.step_index - config.sft.steps,
        )

    def planner(self, reference: Reference) -> UpdatePlanner:
        """Return the planner of each rollout's optimizer steps, with the log-prob passes and checks that it needs."""
        config, rule, gap, correct = self.config, self.rule, self._gap_check(), None
        old_rules = OldPassRules(
            needed_by=needs_old_logprobs(config),
            takes_engines=config.correction.old_logprobs == "rollout",
            recomputes_replayed=config.replay.recompute_logprobs,
            drops=rule.drops_logprob_passes and not config.rollout.bitwise,  # a bitwise run compares every sample
            dense_every_rollouts=config.metrics.dense_every_rollouts,
            dense_samples=config.metrics.dense_samples,
        )
        update_rules = UpdateRules(
            signal=rule,
            loss=config.loss,
            max_response_tokens=config.rollout.max_response_tokens,
            epochs=config.train.epochs_per_rollout,
            held_rollouts=config.critic.warmup_rollouts if config.has_critic else 0,
            group_size=config.rollout.unequal_group_size,
            # Without repack the samples beside a kept one run too, and its repeats may be among them. Under capacities
            # or dropout equal samples have unequal gradients.
            merges_repeats=config.skip.merge_repeats
            and config.plan.repack
            and not any(term.startswith("megatron.") for term in rule.approximated),
        )
        if config.correction.is_on:
            from megatron_rl.trainer.corrections import Corrections

            correct = Corrections(
                settings=config.correction, backend=self.backend, advantage_epsilon=rule.advantage_epsilon
            )
        old = OldLogProbPass(self.backend, old_rules, gap)
        return UpdatePlanner(
            update_rules, self.backend, self.timer, old=old, gap=gap, reference=reference, correct=correct
        )

    def _gap_check(self) -> GapCheck:
        rollout, dtype = self.config.rollout, self.config.model.dtype
        if not rollout.bitwise:
            return GapGuard(rollout, dtype)
        from megatron_rl.trainer.passes.bitwise import BitwiseCheck

        return BitwiseCheck(rollout, dtype, self.backend)


def _measured(timer: StepTimer, stage: str) -> Callable:
    """Return a function without arguments, which returns a context that times its ``with`` block as ``stage``."""
    return lambda: timer.measure(stage)

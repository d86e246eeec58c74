"""The pass for log π_old: the samples that it takes, the settings that need it, and the step that needs no pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.config import Config, CorrectionConfig
from megatron_rl.observability.metrics import add_sums
from megatron_rl.observability.timer import StepTimer
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.trainer.passes.gap_check import GapCheck
from megatron_rl.trainer.passes.passes import OldLogProbs
from megatron_rl.types import BatchPlan, StepKind, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class OldPassRules:
    """Holds the rules for the samples that are passed for log π_old.

    needed_by:            the setting that needs every π_old before the first optimizer step; None
                          if no setting does.
    takes_engines:        whether π_old is the engine's log-prob
                          (``correction.old_logprobs=rollout``).
    recomputes_replayed:  ``replay.recompute_logprobs``; if false, a replayed group's π_old is the
                          engine's log-prob.
    drops:                whether samples that the training plan does not run are left out.
    dense_every_rollouts: in every so many rollouts ``dense_samples`` dropped samples are passed
        too; 0: in no rollout.
    """

    needed_by: str | None
    takes_engines: bool
    recomputes_replayed: bool
    drops: bool
    dense_every_rollouts: int
    dense_samples: int


class OldLogProbPass:
    """Passes a rollout's samples for log π_old. Methods are collectives unless they say otherwise."""

    def __init__(self, backend: MegatronBackend, rules: OldPassRules, gap: GapCheck) -> None:
        self.backend, self.rules, self.gap = backend, rules, gap

    def own_step(self, plan: BatchPlan, taken: TrainingBatch) -> StepPlan | None:
        """Return the rollout's first optimizer step if its own log-probs, detached, can serve as π_old; else None.

        Not a collective. Nothing has moved the weights before the first step, so a pass before it
        would give the same log-probs. The result is None if the π_old of one of its samples is
        known already. That is so for a part that was passed while the next part was sampled. It is
        so for a replayed group if its π_old is the engine's log-prob.
        """
        first = plan.mini_batches[0] if plan.mini_batches else None
        if self.rules.needed_by or first is None or first.kind is not StepKind.REAL:
            return None
        known = taken.known.covered if self.rules.recomputes_replayed else taken.known.covered | taken.replayed
        return None if known[first.ran].any() else first

    def of(self, taken: TrainingBatch, trained: np.ndarray, index: int, *, own: StepPlan | None = None) -> OldLogProbs:
        """Return log π_old after a pass over the samples whose log-probs are unknown.

        trained: bool [S], the samples that the training plan runs. All samples are passed if the
            skip does not cover these passes.
        own: the optimizer step whose samples are left out, since it reads no π_old.

        Every ``metrics.dense_every_rollouts`` rollouts a few dropped samples are passed too, for
        the metrics alone. Under ``correction.old_logprobs=rollout`` only these few are passed, and
        π_old is the engine's log-prob. Without ``replay.recompute_logprobs`` a replayed group's
        π_old is the engine's, too.
        """
        # Choose the samples to pass.
        rules, batch, known = self.rules, taken.batch, taken.known
        from_engine = np.full_like(trained, rules.takes_engines)
        if not rules.recomputes_replayed:
            from_engine |= taken.replayed
        runs_own = np.zeros_like(trained)
        if own is not None:
            runs_own[own.ran] = True
        wanted = (trained if rules.drops else np.ones_like(trained)) & ~from_engine & ~runs_own
        every = rules.dense_every_rollouts
        if every and index % every == 0:
            wanted[np.flatnonzero(~wanted & ~runs_own)[: rules.dense_samples]] = True
        # Pass the samples that are not known yet, and join their log-probs with the known ones and the engine's.
        computed = self.backend.logprobs(batch, wanted & ~known.covered)
        response_tokens = batch.facts.response_tokens
        flat = np.where(np.repeat(known.covered, response_tokens), known.values, computed.flat)
        if from_engine.any():
            engine = self.backend.gather_rollout_logprobs(batch)
            flat = np.where(np.repeat(from_engine, response_tokens), engine, flat)
        sums = add_sums(known.sums, computed.sums)
        metrics = {"logprob/coverage": float((wanted | known.covered | runs_own).mean())}
        if own is None:
            metrics |= self.gap.of_pass(sums, fresh=taken.is_fresh)
        return OldLogProbs(flat=flat, own=own, sums=sums, metrics=metrics, recorded=computed.recorded)


@dataclass(frozen=True, slots=True, kw_only=True)
class OldPass:
    """Passes every sample under the policy; under the reference too if the reward has a KL.

    of_reference: returns log π_ref of chosen samples (``Reference.logprobs``); None if the reward
        has no KL.
    """

    old: OldLogProbPass
    timer: StepTimer
    of_reference: Callable[[Batch, np.ndarray], np.ndarray] | None = None

    def __call__(self, taken: TrainingBatch, index: int) -> Mapping[str, object]:
        """Return the fields ``old`` and ``reference`` of Passes. A collective."""
        everything = np.ones(taken.facts.num_samples, dtype=bool)
        with self.timer.measure("logprob"):
            old = self.old.of(taken, everything, index)
            if self.of_reference is None:
                return {"old": old}
            return {"old": old, "reference": self.of_reference(taken.batch, everything)}


def needs_old_logprobs(config: Config) -> str | None:
    """Return the setting that needs every π_old before the first optimizer step; None if none does."""
    if config.rollout.bitwise:
        return "rollout.bitwise=true"
    if config.correction.old_logprobs != "auto":
        return f"correction.old_logprobs={config.correction.old_logprobs}"
    if config.correction.mode != "none":
        return f"correction.mode={config.correction.mode}"
    if config.correction.off_policy_delta is not None:
        return f"correction.off_policy_delta={config.correction.off_policy_delta}"
    if config.kl_in_reward:
        return "reference.kl_in=reward"
    if config.has_teacher:
        return "advantage.estimator=distillation"
    if config.train.epochs_per_rollout > 1:
        return f"train.epochs_per_rollout={config.train.epochs_per_rollout}"
    if not config.skip.logprob_passes:
        return "skip.logprob_passes=false"
    return None


def passes_parts(correction: CorrectionConfig, routing_replay: str, needed: str | None, num_steps: int) -> bool:
    """Return whether each part of a rollout gets a log-prob pass of its own, as soon as it comes.

    needed: the result of ``needs_old_logprobs``.
    num_steps: the optimizer steps of a rollout.

    It does not if the engine's log-probs are π_old, or if the rollout's only optimizer step needs
    no pass. If the pass replays experts, one pass takes the whole rollout.
    """
    if correction.old_logprobs == "rollout" or routing_replay == "old_logprobs":
        return False
    return needed is not None or num_steps > 1

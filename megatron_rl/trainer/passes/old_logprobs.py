"""The pass for log π_old: which samples it takes, what needs it, and the step that can do without it."""

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
    """Holds which samples are passed for log π_old.

    needed_by:            the setting that needs every π_old before the first optimizer step; None:
                          none does.
    takes_engines:        whether π_old is the engine's own (``correction.old_logprobs=rollout``).
    recomputes_replayed:  ``replay.recompute_logprobs``; otherwise a replayed group's π_old is the
                          engine's own.
    drops:                whether samples that the training plan does not run are left out.
    dense_every_rollouts: of so many rollouts one has ``dense_samples`` dropped samples passed too;
        0: none has.
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
        """Return the rollout's first optimizer step if its own log-probs, detached, can be its π_old. No collective.

        Its weights are those that a pass before it would have: it is the first, so that nothing has
        moved them. There is none if a sample's π_old is known already, of a part that was passed
        while the next one was sampled, or is the engine's own, of a replayed group.
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
        the metrics alone. Under ``correction.old_logprobs=rollout`` only those are passed, and
        π_old is the engine's own; so it is for replayed groups without
        ``replay.recompute_logprobs``.
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
        # Pass those that are not known yet, and join their log-probs with the known and the engine's own.
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
    """Passes every sample under the policy, and under the reference too if a KL is taken from the reward.

    of_reference: returns log π_ref of chosen samples (``Reference.logprobs``); None without a KL in
        the reward.
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
    """Return whether the parts of a rollout are worth a log-prob pass each, as they come.

    needed: what ``needs_old_logprobs`` returns. num_steps: the optimizer steps of a rollout.

    They are not if the engine's log-probs are π_old, or if the one optimizer step needs no pass. A
    pass whose experts are replayed is one, over the whole rollout.
    """
    if correction.old_logprobs == "rollout" or routing_replay == "old_logprobs":
        return False
    return needed is not None or num_steps > 1

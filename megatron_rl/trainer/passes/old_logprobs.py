"""The forward pass for log π_old: its samples, the settings that need it, and the optimizer step that needs none."""

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
    """Holds the rules that choose the samples of the forward pass for log π_old.

    needed_by:     the setting that needs log π_old of all samples before the first optimizer step;
                   None if no setting does.
    takes_engines: whether π_old is the engine's log-prob (``correction.old_logprobs=rollout``).
    recomputes_replayed: ``replay.recompute_logprobs``; if false, a replayed group's π_old is the
        engine's log-prob.
    drops:         whether the pass leaves out the samples that the training plan does not run.
    dense_every_rollouts: n: in one of n rollouts the pass also covers ``dense_samples`` dropped
        samples; 0: in none.
    """

    needed_by: str | None
    takes_engines: bool
    recomputes_replayed: bool
    drops: bool
    dense_every_rollouts: int
    dense_samples: int


class OldLogProbPass:
    """Computes log π_old of a rollout's samples by a forward pass.

    Methods are collectives unless they say otherwise.

    rules: choose the samples that the pass covers.
    gap: compares the pass's log-probs with the engine's.
    """

    def __init__(self, backend: MegatronBackend, rules: OldPassRules, gap: GapCheck) -> None:
        self.backend, self.rules, self.gap = backend, rules, gap

    def own_step(self, plan: BatchPlan, taken: TrainingBatch) -> StepPlan | None:
        """Return the first optimizer step of a rollout if its own log-probs, detached, can serve as π_old; else None.

        plan, taken: the plan of the rollout's optimizer steps, and its batch.

        The weights do not change before the first step, so a forward pass before it would give the
        same log-probs. Not a collective.

        Returns None, too, if log π_old of one of the step's samples is known already: from a pass that
        ran while the engine still sampled, or because a replayed group takes the engine's log-prob.
        """
        first = plan.mini_batches[0] if plan.mini_batches else None
        if self.rules.needed_by or first is None or first.kind is not StepKind.REAL:
            return None
        known = taken.known.covered if self.rules.recomputes_replayed else taken.known.covered | taken.replayed
        return None if known[first.ran].any() else first

    def of(self, taken: TrainingBatch, trained: np.ndarray, index: int, *, own: StepPlan | None = None) -> OldLogProbs:
        """Return log π_old of a rollout, after a forward pass over the samples whose log-probs are not known yet.

        taken: the rollout's batch.
        trained: bool [S], the samples that the training plan runs. The pass is for these, or for
            all samples if ``OldPassRules.drops`` is False.
        index: the rollout's index, from 0.
        own: the optimizer step that takes its own log-probs as π_old. Its samples are left out.
            None if there is no such step.

        Some samples are left out, since their π_old is the engine's log-prob: all samples under
        ``correction.old_logprobs=rollout``, and replayed groups without
        ``replay.recompute_logprobs``. Every ``metrics.dense_every_rollouts`` rollouts the pass
        also covers a few samples that would not run otherwise, for the metrics alone.
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
    """Computes log π_old of every sample before the advantages, and log π_ref too if the reward has a KL.

    old: computes log π_old.
    of_reference: a function that returns log π_ref of chosen samples (``Reference.logprobs``); None
        if the reward has no KL.
    """

    old: OldLogProbPass
    timer: StepTimer
    of_reference: Callable[[Batch, np.ndarray], np.ndarray] | None = None

    def __call__(self, taken: TrainingBatch, index: int) -> Mapping[str, object]:
        """Return {field of ``Passes``: result}: ``old``, and ``reference`` if the reward has a KL. A collective."""
        everything = np.ones(taken.facts.num_samples, dtype=bool)
        with self.timer.measure("logprob"):
            old = self.old.of(taken, everything, index)
            if self.of_reference is None:
                return {"old": old}
            return {"old": old, "reference": self.of_reference(taken.batch, everything)}


def needs_old_logprobs(config: Config) -> str | None:
    """Return the setting, as ``key=value``, that needs every log π_old before the first optimizer step, or None."""
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
    """Return whether log-prob passes run part by part, each on ``rollout.producer.min_groups`` groups once scored.

    routing_replay: ``rollout.routing_replay``.
    needed: the result of ``needs_old_logprobs``.
    num_steps: the optimizer steps of a rollout.

    False if the engine's log-probs are π_old, or if the rollout's only optimizer step needs no
    pass. False also if the pass records routed experts: then one pass covers the whole rollout.
    """
    if correction.old_logprobs == "rollout" or routing_replay == "old_logprobs":
        return False
    return needed is not None or num_steps > 1

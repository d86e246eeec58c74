"""The update of a rollout: decides signal, log-probs, importance weights and the plan of its optimizer steps.

They are decided nowhere else, and in a fixed order. Signal by advantage alone plans the log-prob pass; its log-probs
give importance weights, which may take signal away (never give it), and the samples that are left are planned anew.
Every rank decides from the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_rl.algorithm.advantage import loss_inputs
from megatron_rl.algorithm.signal import SignalRule, has_signal
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.backend.routed_rows import RecordedExperts
from megatron_rl.config import Config
from megatron_rl.observability.metrics import GAPS, add_sums, divide
from megatron_rl.observability.timer import StepTimer
from megatron_rl.planning.num_steps import steps_per_rollout
from megatron_rl.rollout.logprob_gap import guard_logprob_gap
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.trainer.advantages import AdvantageResult
from megatron_rl.trainer.bitwise import GAP, compare_rollout, compare_update
from megatron_rl.trainer.corrections import apply_corrections
from megatron_rl.trainer.reference_policy import ReferencePolicy
from megatron_rl.types import Advantages, BatchPlan, LossInputs, StepKind, StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OldLogProbs:
    """Holds log π_old of a rollout, and its gap to the engine's.

    flat:    float32 [T] over response tokens; 0 where it was not passed.
    own:     the optimizer step whose π_old is its own log-prob, detached, so that no pass gives it; None: no step.
    sums:    of the gap over the samples passed; those of the ``own`` step join them once it has run.
    metrics: of the pass.
    experts: that the pass has chosen, to be replayed (``rollout.routing_replay=old_logprobs``).
    """

    flat: np.ndarray
    own: StepPlan | None
    sums: Mapping[str, float]
    metrics: Mapping[str, float]
    experts: RecordedExperts | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """Holds all values that a rollout's optimizer steps read.

    batch:      with the rows that this rank's micro-batches need.
    steps:      each optimizer step's plan and fingerprint: mini-batches in order, epoch after epoch.
    signal:     bool [S], by advantages and importance weights; in a critic's warm-up too, which trains none of it.
    trained:    bool [S], the samples whose gradient is asked for: ``signal``, or none while the policy is held.
    old:        log π_old.
    is_fresh:   whether the engine sampled by the weights of the first step.
    reference:  float32 [T] flat, log π_ref; None where the loss does not read it.
    importance: float64 [T] flat, the correction's weights; None: all are 1.
    metrics:    of log-prob passes and corrections.
    """

    config: Config
    batch: Batch
    plan: BatchPlan
    steps: tuple[tuple[StepPlan, bytes], ...]
    advantages: Advantages
    signal: np.ndarray
    trained: np.ndarray
    old: OldLogProbs
    is_fresh: bool
    reference: np.ndarray | None
    importance: np.ndarray | None
    kl_coefficient: float
    metrics: Mapping[str, float]

    def inputs(self, step: StepPlan) -> LossInputs:
        """Fold the reduction's weights into the advantages, by the denominators of this step's mini-batch."""
        return loss_inputs(
            self.config,
            self.batch.facts,
            step,
            self.advantages,
            self.trained,
            old=None if step is self.old.own else self.old.flat,
            reference=self.reference,
            importance=self.importance,
            kl_coefficient=self.kl_coefficient,
        )


class UpdatePlanner:
    """Prepares updates. Methods are collectives unless they say otherwise."""

    def __init__(
        self, config: Config, backend: MegatronBackend, rule: SignalRule, reference: ReferencePolicy, timer: StepTimer
    ) -> None:
        self.config, self.backend, self.rule, self.reference, self.timer = config, backend, rule, reference, timer
        self.needs_old_logprobs = needs_old_logprobs(config)

    def prepare(self, taken: TrainingBatch, result: AdvantageResult, *, index: int, holds: bool) -> Update:
        """Prepare the update of rollout ``index``. ``holds``: the policy does not move, while a critic warms up."""
        # Signal by advantage alone decides the samples of the log-prob pass.
        batch, facts, penalty = taken.batch, taken.facts, result.penalty
        passed = penalty or result.teacher
        signal = has_signal(
            result.advantages.largest(facts.response_tokens),
            facts.loss_tokens,
            advantage_epsilon=self.rule.advantage_epsilon,
            sample_ids=facts.sample_ids,
            way_out="look at the rewards of its group and at the settings advantage.*",
        )
        trained = np.zeros_like(signal) if holds else signal
        with self.timer.measure("plan"):
            plan = self._plan(batch, trained, holds=holds)
        with self.timer.measure("logprob"):
            runs = runs_S(plan, facts.num_samples)
            if passed:
                old = OldLogProbs(flat=passed.old, own=None, sums={}, metrics=passed.metrics, experts=passed.experts)
            else:
                old = self.old_logprobs(taken, runs, index, own=self._own_step(plan, taken))
            equal = compare_rollout(self.backend, taken, old.flat) if self.config.rollout.bitwise else {}
            corrected = apply_corrections(
                self.config.correction,
                self.backend,
                batch,
                advantages=result.advantages,
                signal=trained,
                passed=runs,
                old_logprobs=old.flat,
                advantage_epsilon=self.rule.advantage_epsilon,
            )
            # Where masks took samples away, plan anew: fewer run, and none that was not passed.
            if not np.array_equal(corrected.signal, trained):
                signal = trained = corrected.signal
                plan = self._plan(batch, trained, holds=holds)
            reference = (
                penalty.reference if penalty else self._reference_logprobs(batch, runs_S(plan, facts.num_samples))
            )
        with self.timer.measure("plan"):
            if old.experts is not None:
                batch = old.experts.given_to(batch)
            batch = self.backend.fetch_rows(batch, plan)
        return Update(
            config=self.config,
            batch=batch,
            plan=plan,
            steps=(*zip(plan.mini_batches, plan.fingerprints(), strict=True),) * self.config.train.epochs_per_rollout,
            advantages=result.advantages,
            signal=signal,
            trained=trained,
            old=old,
            is_fresh=taken.is_fresh,
            reference=reference,
            importance=corrected.weights,
            kl_coefficient=self.reference.loss_coefficient,
            metrics={**old.metrics, **corrected.metrics, **equal},
        )

    def _plan(self, batch: Batch, trained: np.ndarray, *, holds: bool) -> BatchPlan:
        plan = self.backend.plan("train", batch, trained, drops=self.rule.drops or holds)
        return plan.held() if holds else plan

    def _own_step(self, plan: BatchPlan, taken: TrainingBatch) -> StepPlan | None:
        """Return the rollout's first optimizer step where its own log-probs, detached, can be its π_old.

        Its weights are those that a pass before it would have: it is the first, so that nothing has moved them. There
        is none where a sample's π_old is known already, of a part that was passed while the next one was sampled, or is
        the engine's own, of a replayed group.
        """
        first = plan.mini_batches[0] if plan.mini_batches else None
        if self.needs_old_logprobs or first is None or first.kind is not StepKind.REAL:
            return None
        given = taken.known.covered if self.config.replay.recompute_logprobs else taken.known.covered | taken.replayed
        return None if given[first.ran].any() else first

    def old_logprobs(
        self, taken: TrainingBatch, trained: np.ndarray, index: int, *, own: StepPlan | None = None
    ) -> OldLogProbs:
        """Return log π_old after a pass over the samples whose log-probs are unknown.

        trained: bool [S], the samples that the training plan runs. All samples are passed where the skip does not cover
            these passes.
        own: the optimizer step whose samples are left out, since it reads no π_old.

        Every ``metrics.dense_every_rollouts`` rollouts a few dropped samples are passed too, for the metrics alone.
        Under ``correction.old_logprobs=rollout`` only those are passed, and π_old is the engine's own; so it is for
        replayed groups without ``replay.recompute_logprobs``.
        """
        # Choose the samples to pass.
        config, batch, known = self.config, taken.batch, taken.known
        from_engine = np.full_like(trained, config.correction.old_logprobs == "rollout")
        if not config.replay.recompute_logprobs:
            from_engine |= taken.replayed
        runs_own = np.zeros_like(trained)
        if own is not None:
            runs_own[own.ran] = True
        drops = self.rule.drops_logprob_passes and not config.rollout.bitwise  # which compares every sample
        wanted = (trained if drops else np.ones_like(trained)) & ~from_engine & ~runs_own
        every = config.metrics.dense_every_rollouts
        if every and index % every == 0:
            wanted[np.flatnonzero(~wanted & ~runs_own)[: config.metrics.dense_samples]] = True
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
            metrics |= self.gap_metrics(sums, fresh=taken.is_fresh)
        return OldLogProbs(flat=flat, own=own, sums=sums, metrics=metrics, experts=computed.experts)

    def gap_metrics(self, sums: Mapping[str, float], *, fresh: bool) -> dict[str, float]:
        """Return the metrics of the gap to the engine's log-probs; warn or raise where it is too large. No collective.

        sums: over all ranks. fresh: whether engine and trainer had the same weights.
        """
        guard_logprob_gap(sums, self.config.rollout, self.config.model.dtype, fresh=fresh)
        return divide({name: sums[name] for name in ("tokens", *GAPS) if name in sums})

    def own_gap_metrics(self, update: Update, number: int, result: StepResult) -> dict[str, float]:
        """Return the gap's metrics of a rollout whose ``number``-th step has measured it; {} for any other step.

        Under ``rollout.bitwise`` every step gets the rollout's, and the first one is compared itself.
        """
        if self.config.rollout.bitwise:
            if number == 0:
                compare_update(result)
            return {GAP: update.metrics[GAP]}
        if update.steps[number][0] is not update.old.own:
            return {}
        own = {name: result.sums[name] for name in ("tokens", *GAPS)}
        return self.gap_metrics(add_sums(update.old.sums, own), fresh=update.is_fresh)

    def _reference_logprobs(self, batch: Batch, trained: np.ndarray) -> np.ndarray | None:
        """Return log π_ref, flat, of the samples that the training plan runs; None without a KL."""
        if not self.reference.is_needed:
            return None
        return self.reference.logprobs(batch, trained if self.rule.drops_logprob_passes else np.ones_like(trained))


def needs_old_logprobs(config: Config) -> str | None:
    """Return the setting that needs every π_old before the first optimizer step; None where none does."""
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


def passes_parts(config: Config) -> bool:
    """Return whether the parts of a rollout are worth a log-prob pass each, as they come.

    They are not where the engine's log-probs are π_old, or where the one optimizer step needs no pass. A pass whose
    experts are replayed is one, over the whole rollout.
    """
    if config.correction.old_logprobs == "rollout" or config.rollout.routing_replay == "old_logprobs":
        return False
    return needs_old_logprobs(config) is not None or steps_per_rollout(config) > 1


def runs_S(plan: BatchPlan, num_samples: int) -> np.ndarray:
    """Return bool [S], the samples that a plan runs.

    Without ``plan.repack`` these include samples without signal that share a micro-batch with one that has it; their KL
    term needs true log-probs.
    """
    runs = np.zeros(num_samples, dtype=bool)
    for step in plan.mini_batches:
        runs[step.ran] = True
    return runs

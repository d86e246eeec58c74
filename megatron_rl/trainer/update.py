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
from megatron_rl.config import Config
from megatron_rl.observability.metrics import add_sums, divide
from megatron_rl.observability.timer import StepTimer
from megatron_rl.rollout.manager import guard_logprob_gap
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.trainer.advantages import AdvantageResult
from megatron_rl.trainer.corrections import apply_corrections
from megatron_rl.trainer.reference_policy import ReferencePolicy
from megatron_rl.types import Advantages, BatchPlan, LossInputs, StepKind, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """Holds all values that a rollout's optimizer steps read.

    batch:      with the rows that this rank's micro-batches need.
    steps:      each optimizer step's plan and fingerprint: mini-batches in order, epoch after epoch.
    signal:     bool [S], by advantages and importance weights; in a critic's warm-up too, which trains none of it.
    trained:    bool [S], the samples whose gradient is asked for: ``signal``, or none while the policy is held.
    old:        float32 [T] flat, log π_old.
    own:        the optimizer step whose π_old is its own log-prob, which ``old`` need not hold; None: no step.
    gaps:       sums of the gap to the engine's log-probs over the pass that gave ``old``.
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
    old: np.ndarray
    own: StepPlan | None
    gaps: Mapping[str, float]
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
            old=None if step is self.own else self.old,
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
        self.needs_old_logprobs = needs_old_logprobs(config, rule)

    def prepare(self, taken: TrainingBatch, result: AdvantageResult, *, index: int, holds: bool) -> Update:
        """Prepare the update of rollout ``index``. ``holds``: the policy does not move, while a critic warms up."""
        # Signal by advantage alone decides the samples of the log-prob pass.
        batch, facts, penalty = taken.batch, taken.facts, result.penalty
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
            own = None if holds else self._own_step(plan, taken)
            if penalty:
                old, gaps, metrics = penalty.old, {}, penalty.metrics
            else:
                left_out = np.zeros_like(runs)
                left_out[[] if own is None else own.order] = True
                old, gaps, metrics = self.old_logprobs(taken, runs & ~left_out, index, left_out=left_out)
                if own is None:
                    metrics |= self.judge_gaps(gaps, fresh=taken.is_fresh)
            corrected = apply_corrections(
                self.config.correction,
                self.backend,
                batch,
                advantages=result.advantages,
                signal=trained,
                passed=runs,
                old_logprobs=old,
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
            own=own,
            gaps=gaps,
            is_fresh=taken.is_fresh,
            reference=reference,
            importance=corrected.weights,
            kl_coefficient=self.reference.loss_coefficient,
            metrics={**metrics, **corrected.metrics},
        )

    def _plan(self, batch: Batch, trained: np.ndarray, *, holds: bool) -> BatchPlan:
        plan = self.backend.plan("train", batch, trained, drops=self.rule.drops or holds)
        return plan.held() if holds else plan

    def judge_gaps(self, sums: Mapping[str, float], *, fresh: bool) -> dict[str, float]:
        """Return the metrics of the gap to the engine's log-probs; warn or raise where it is too large. No collective.

        sums: over all ranks. fresh: whether engine and trainer had the same weights.
        """
        guard_logprob_gap(sums, self.config.rollout, self.config.model.dtype, fresh=fresh)
        return divide(sums)

    def _own_step(self, plan: BatchPlan, taken: TrainingBatch) -> StepPlan | None:
        """Return the rollout's first optimizer step where its own log-probs, detached, can be its π_old.

        Its weights are those that a pass before it would have: it is the first, so that nothing has moved them. A
        replayed sample whose π_old is the engine's keeps the pass.
        """
        first = plan.mini_batches[0] if plan.mini_batches else None
        if self.needs_old_logprobs or first is None or first.kind is not StepKind.REAL:
            return None
        if not self.config.replay.recompute_logprobs and taken.replayed[first.order].any():
            return None
        return first

    def old_logprobs(
        self, taken: TrainingBatch, trained: np.ndarray, index: int, *, left_out: np.ndarray | None = None
    ) -> tuple[np.ndarray, dict[str, float], dict[str, float]]:
        """Return log π_old, float32 [T] flat, after a pass over the samples whose log-probs are unknown.

        trained: bool [S], the samples that the training plan runs. All samples are passed where the skip does not cover
            these passes.
        left_out: bool [S], samples that are not passed, since their step reads no π_old; None: none.

        The second value holds the sums of the gap to the engine's log-probs, the third metrics.

        Every ``metrics.dense_every_rollouts`` rollouts a few dropped samples are passed too, for the metrics alone.
        Under ``correction.old_logprobs=rollout`` only those are passed, and π_old is the engine's own; so it is for
        replayed groups without ``replay.recompute_logprobs``.
        """
        # Choose the samples to pass.
        config, batch, known = self.config, taken.batch, taken.known
        from_engine = np.full_like(trained, config.correction.old_logprobs == "rollout")
        if not config.replay.recompute_logprobs:
            from_engine |= taken.replayed
        wanted = (trained if self.rule.drops_logprob_passes else np.ones_like(trained)) & ~from_engine
        every = config.metrics.dense_every_rollouts
        if every and index % every == 0:
            others = ~wanted if left_out is None else ~wanted & ~left_out
            wanted[np.flatnonzero(others)[: config.metrics.dense_samples]] = True
        # Pass those that are not known yet, and join their log-probs with the known and the engine's own.
        covered = wanted | known.covered
        computed = self.backend.logprobs(batch, wanted & ~known.covered)
        sums = add_sums(known.sums, computed.sums)
        response_tokens = batch.facts.response_tokens
        old = np.where(np.repeat(known.covered, response_tokens), known.values, computed.flat)
        if from_engine.any():
            engine = self.backend.gather_rollout_logprobs(batch)
            old = np.where(np.repeat(from_engine, response_tokens), engine, old)
        return old, sums, {"logprob/coverage": float(covered.mean())}

    def _reference_logprobs(self, batch: Batch, trained: np.ndarray) -> np.ndarray | None:
        """Return log π_ref, flat, of the samples that the training plan runs; None without a KL."""
        if not self.reference.is_needed:
            return None
        return self.reference.logprobs(batch, trained if self.rule.drops_logprob_passes else np.ones_like(trained))


def needs_old_logprobs(config: Config, rule: SignalRule) -> str | None:
    """Return the setting that needs every π_old before the first optimizer step; None where none does."""
    if config.correction.old_logprobs != "auto":
        return f"correction.old_logprobs={config.correction.old_logprobs}"
    if config.correction.is_on:
        return "a correction of the engine's log-probs"
    if config.kl_in_reward:
        return "reference.kl_in=reward"
    if config.train.epochs_per_rollout > 1:
        return f"train.epochs_per_rollout={config.train.epochs_per_rollout}"
    if not rule.drops_logprob_passes:
        return "skip.logprob_passes=false"
    return None


def runs_S(plan: BatchPlan, num_samples: int) -> np.ndarray:
    """Return bool [S], the samples that a plan runs.

    Without ``plan.repack`` these include samples without signal that share a micro-batch with one that has it; their KL
    term needs true log-probs.
    """
    runs = np.zeros(num_samples, dtype=bool)
    for step in plan.mini_batches:
        runs[step.order] = True
    return runs

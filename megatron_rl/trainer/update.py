"""The preparation of a rollout's update: signal, log-probs, importance weights and the plan of optimizer steps.

This file alone decides them, in this order. A sample has signal if it has a loss token whose
|advantage| is larger than ``skip.advantage_epsilon`` (0 by default). The log-prob pass runs the
samples with signal. The log-probs give the importance weights. Weights of 0 take a sample's signal
away; no weight gives signal. If a sample lost its signal, the steps are planned again without it.
Every rank decides from the same numbers. Of equal samples of a step one is passed and runs, and its
log-probs are those of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.algorithm.advantage import loss_inputs
from megatron_rl.algorithm.signal import SignalRule, has_signal
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.config import LossConfig
from megatron_rl.observability.timer import StepTimer
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.trainer.advantages.source import AdvantageResult, CriticTargets, MeasuredKL
from megatron_rl.trainer.decision import Decision, decide
from megatron_rl.trainer.passes.gap_check import GapCheck
from megatron_rl.trainer.passes.old_logprobs import OldLogProbPass
from megatron_rl.trainer.passes.passes import OldLogProbs, Passes
from megatron_rl.trainer.reference import Reference
from megatron_rl.types import Advantages, BatchPlan, LossInputs, StepKind, StepPlan, StepResult

if TYPE_CHECKING:
    from megatron_rl.trainer.corrections import CorrectedSignal

Correct = Callable[[Batch, Decision, Advantages, np.ndarray], "CorrectedSignal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRules:
    """Holds the settings of a rollout's update.

    signal:        the rule by which samples are dropped.
    max_response_tokens: ``rollout.max_response_tokens``, a denominator of
        ``loss.reduction=sequence_sum_norm``.
    epochs:        how often each rollout is trained on.
    group_size:    the mean number of samples of a group where groups may be unequal; None: groups
        are equal.
    merges_repeats: whether of equal samples of a step one runs (algorithm/repeats.py).
    held_rollouts: the number of first rollouts that train the critic alone and leave the policy as
                   it is (a critic's warm-up).
    """

    signal: SignalRule
    loss: LossConfig
    max_response_tokens: int
    epochs: int
    held_rollouts: int = 0
    group_size: int | None = None
    merges_repeats: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStep:
    """Holds the plan of one optimizer step of a rollout.

    fingerprint: a digest of the plan, which all ranks compare.
    number:      the step's number within the rollout, from 0.
    is_last:     whether it is the rollout's last step.
    """

    plan: StepPlan
    fingerprint: bytes
    number: int
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """Holds everything that a rollout's optimizer steps need.

    index:          the rollout's index, from 0.
    batch:          the batch, with the samples that this rank's micro-batches need.
    steps:          each optimizer step: mini-batches in order, epoch after epoch.
    old:            log π_old.
    is_fresh:       whether the engine sampled by the weights of the first step.
    reference:      float32 [T], log π_ref of each response token, sample after sample; None if the
                    loss does not read it.
    importance:     float64 [T], the importance weights in the same order; None if all are 1.
    kl_coefficient: β of the KL in the loss; 0 if the loss has no KL.
    kl:             the KL that was subtracted from the reward. None if the reward has no KL, or if
                    the rollout does not train the policy.
    targets:        the critic's targets; None without a critic.
    metrics:        the metrics of advantages, log-prob passes and importance weights.
    """

    rules: UpdateRules
    index: int
    batch: Batch
    decision: Decision
    steps: tuple[UpdateStep, ...]
    advantages: Advantages
    old: OldLogProbs
    is_fresh: bool
    reference: np.ndarray | None
    importance: np.ndarray | None
    kl_coefficient: float
    kl: MeasuredKL | None
    targets: CriticTargets | None
    metrics: Mapping[str, float]

    def inputs(self, step: UpdateStep) -> LossInputs:
        """Return the inputs of the loss in one optimizer step.

        Each advantage is multiplied by the weight that ``loss.reduction`` gives its sample in the step's
        mini-batch.
        """
        inputs = loss_inputs(
            self.rules.loss,
            self.batch.facts,
            step.plan,
            self.advantages,
            self.decision.trained,
            drops=self.rules.signal.drops,
            max_response_tokens=self.rules.max_response_tokens,
            group_size=self.rules.group_size,
            copies=self.decision.copies,
        )
        return replace(
            inputs,
            old_logprobs=None if step.plan is self.old.own else self.old.flat,
            reference_logprobs=self.reference,
            importance_weights=self.importance,
            kl_coefficient=self.kl_coefficient,
        )


class UpdatePlanner:
    """Plans the optimizer steps of each rollout. Methods are collectives unless they say otherwise.

    rules:     the settings of each rollout's update.
    old:       computes log π_old by a forward pass.
    gap:       compares the trainer's log-probs with the engine's, in that pass or in the optimizer
               steps.
    reference: computes log π_ref.
    correct:   a ``Corrections``, which computes the importance weights; None if all weights are 1.
    """

    def __init__(
        self,
        rules: UpdateRules,
        backend: MegatronBackend,
        timer: StepTimer,
        *,
        old: OldLogProbPass,
        gap: GapCheck,
        reference: Reference,
        correct: Correct | None = None,
    ) -> None:
        self.rules, self.backend, self.timer = rules, backend, timer
        self.old, self.gap, self.reference, self.correct = old, gap, reference, correct

    def prepare(self, taken: TrainingBatch, passes: Passes, result: AdvantageResult, index: int) -> Update:
        """Plan a rollout's optimizer steps, and return everything that they need.

        taken: the rollout's batch.
        passes: the results of the forward passes that ran before the advantages. Log π_old and log
            π_ref are computed here if they are needed and ``passes`` lacks them.
        result: the advantages.
        index: the rollout's index, from 0.
        """
        # Signal by advantage alone decides the samples of the log-prob pass.
        batch, kind = taken.batch, StepKind.HELD if index < self.rules.held_rollouts else StepKind.REAL
        signal = self._signal(result.advantages, taken)
        with self.timer.measure("plan"):
            decision = self._decide(batch, signal, kind, result.advantages)
        with self.timer.measure("logprob"):
            old = passes.old
            if old is None:
                old = self.old.of(taken, decision.runs, index, own=self.old.own_step(decision.plan, taken))
            equal = self.gap.of_rollout(taken, old)
            weights, corrected = None, {}
            if self.correct is not None:
                old = old.of_repeats(decision.stand_in, batch.facts)
                verdict = self.correct(batch, decision, result.advantages, old.flat)
                weights, corrected = verdict.weights, verdict.metrics
                # If masks took samples away, plan anew: fewer run, and none that was not passed.
                if not np.array_equal(verdict.signal, decision.trained):
                    decision = self._decide(batch, verdict.signal, kind, result.advantages)
            reference = passes.reference
            if reference is None and self.reference.is_needed:
                dense = np.ones_like(decision.runs)
                runs = decision.runs if self.rules.signal.drops_logprob_passes else dense
                reference = self.reference.logprobs(batch, runs)
        with self.timer.measure("plan"):
            for recorded in old.recorded:
                batch = recorded.given_to(batch)
            batch = self.backend.fetch_rows(batch, decision.plan)
        return Update(
            rules=self.rules,
            index=index,
            batch=batch,
            decision=decision,
            steps=steps_of(decision.plan, self.rules.epochs),
            advantages=result.advantages,
            old=old,
            is_fresh=taken.is_fresh,
            reference=reference,
            importance=weights,
            kl_coefficient=self.reference.loss_coefficient,
            kl=None if kind is StepKind.HELD else result.kl,
            targets=result.targets,
            metrics={**old.metrics, **result.metrics, **corrected, **equal},
        )

    def _signal(self, advantages: Advantages, taken: TrainingBatch) -> np.ndarray:
        """Return bool [S]: whether a sample has a loss token and an |advantage| above ``skip.advantage_epsilon``.

        Not a collective.
        """
        facts = taken.facts
        return has_signal(
            advantages.largest(facts.response_tokens),
            facts.loss_tokens,
            advantage_epsilon=self.rules.signal.advantage_epsilon,
            sample_ids=facts.sample_ids,
            way_out="look at the rewards of its group and at the settings advantage.*",
        )

    def _decide(self, batch: Batch, signal: np.ndarray, kind: StepKind, advantages: Advantages) -> Decision:
        merged_by = advantages if self.rules.merges_repeats else None
        return decide(self.backend, batch, signal, kind, drops=self.rules.signal.drops, merged_by=merged_by)

    def gap_metrics(self, update: Update, step: UpdateStep, result: StepResult) -> dict[str, float]:
        """Return an optimizer step's metrics of the gap to the engine; {} if the step measures none. Not a collective.

        The gap is the difference between the trainer's and the engine's log-probs.
        """
        return self.gap.of_step(update.old, step.plan, result, number=step.number, fresh=update.is_fresh)


def steps_of(plan: BatchPlan, epochs: int) -> tuple[UpdateStep, ...]:
    """Return a rollout's optimizer steps: the plan's mini-batches in order, repeated ``epochs`` times."""
    planned = [*zip(plan.mini_batches, plan.fingerprints(), strict=True)] * epochs
    return tuple(
        UpdateStep(plan=step, fingerprint=fingerprint, number=number, is_last=number == len(planned) - 1)
        for number, (step, fingerprint) in enumerate(planned)
    )

"""The writer of a run's metrics.jsonl, and the interface of objects that record a run's events, such as rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.checkpoint.run_state import RestoredRun
from megatron_rl.observability.metrics import MetricsWriter, Row, step_metrics
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.trainer.advantages.source import AdvantageResult
from megatron_rl.trainer.reference import Reference
from megatron_rl.trainer.update import Update
from megatron_rl.types import StepResult

if TYPE_CHECKING:
    from megatron_rl.observability.completions import Completion

_OF_RL = ("train/clip_ratio", "train/ratio", "train/kl")  # a supervised step does not measure these


class Record(Protocol):
    """Records the events of a run; a subclass overrides the methods for the events that it needs.

    Every rank calls each method. For a rollout ``rollout`` comes first, then ``update``, then
    ``row`` for each optimizer step. No method is a collective.
    """

    def resume(self, restored: RestoredRun) -> None:
        """Continue from the state of the checkpoint that the run resumes from."""

    def rollout(self, index: int, taken: TrainingBatch, result: AdvantageResult) -> Mapping[str, float]:
        """Record rollout ``index`` and its advantages; return metrics for the next row of metrics.jsonl."""
        return {}

    def update(self, update: Update) -> Mapping[str, float]:
        """Record the planned optimizer steps of a rollout; return metrics for the next row of metrics.jsonl."""
        return {}

    def row(self, row: Row) -> None:
        """Record one optimizer step, of RL or of the supervised start. ``row``: the step's row of metrics.jsonl."""

    def end(self) -> None:
        """Record the run's end, whatever its cause."""


class Records:
    """Writes the rows of metrics.jsonl, and passes each event of the run on to the objects in ``others``.

    No method is a collective.

    others: what else records the run, such as its trace, in the order in which they are called.
    num_rollouts: the number of rollouts recorded so far, those before a resume included.
    """

    def __init__(
        self,
        backend: TrainableModel,
        reference: Reference,
        writer: MetricsWriter,
        others: Sequence[Record] = (),
    ) -> None:
        self.backend, self.reference, self.writer, self.others = backend, reference, writer, tuple(others)
        self.num_rollouts = 0
        self._next_row: dict[str, float] = {}
        self._sampled: list[Completion] = []

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add metrics, by name, to the next row of metrics.jsonl."""
        self._next_row |= metrics

    def show(self, completions: Sequence[Completion]) -> None:
        """Keep this rank's chosen completions, to be written with the next row; do nothing except on the main rank."""
        if self.backend.topology.is_main:
            self._sampled += completions

    def resume(self, restored: RestoredRun) -> None:
        """Continue from the state of the checkpoint that the run resumes from."""
        self.num_rollouts = restored.trace_rollouts
        for record in self.others:
            record.resume(restored)

    def rollout(self, index: int, taken: TrainingBatch, result: AdvantageResult) -> None:
        """Record rollout ``index`` and its advantages."""
        self.num_rollouts += 1
        self.add(taken.metrics)
        for record in self.others:
            self.add(record.rollout(index, taken, result))

    def update(self, update: Update) -> None:
        """Record the planned optimizer steps of a rollout."""
        self.add(update.metrics)
        for record in self.others:
            self.add(record.update(update))

    def write(self, phase: str, result: StepResult, values: Mapping[str, float]) -> None:
        """Write one optimizer step's row: its metrics, the metrics added since the last row, and ``values``.

        phase: ``rl``, or the name of the supervised phase.
        result: the step's result.
        values: further metrics by name.
        """
        row = {"step": self.backend.step_index, "step_kind": result.kind, "phase": phase, **step_metrics(result)}
        row |= {**self._next_row, **values, "weight_version": self.backend.weight_version}
        sampled, self._next_row, self._sampled = self._sampled, {}, []
        unmeasured = set(_OF_RL) if phase != "rl" else set()
        if not self.reference.is_needed:
            unmeasured.add("train/kl")
        elif phase == "rl":
            row["train/kl_coefficient"] = self.reference.coefficient
        written = self.writer.write({name: row[name] for name in row if name not in unmeasured}, sampled)
        for record in self.others:
            record.row(written)

    def end(self) -> None:
        """Tell each of ``others``, such as the run's trace, that the run ends."""
        for record in self.others:
            record.end()

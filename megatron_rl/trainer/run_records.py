"""Objects that record a run's events: in replay buffer, trace file, progress bar, saved plans and stall warning."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.checkpoint.run_state import RestoredRun
from megatron_rl.observability.metrics import METRICS_FILE, Row, read_metrics
from megatron_rl.observability.progress_bar import ProgressBar
from megatron_rl.observability.stall_warning import StallWarning
from megatron_rl.observability.trace import Recorder
from megatron_rl.rollout.queue import RolloutQueue
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.trainer.advantages.source import AdvantageResult
from megatron_rl.trainer.records import Record
from megatron_rl.trainer.update import Update


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecord(Record):
    """Writes trace.jsonl and coefficients.json, which the simulator reads."""

    recorder: Recorder

    def resume(self, restored: RestoredRun) -> None:
        """Continue the numbering of rollouts after the checkpoint's last rollout."""
        self.recorder.num_rollouts = restored.trace_rollouts

    def rollout(self, index: int, taken: TrainingBatch, result: AdvantageResult) -> Mapping[str, float]:
        """Write the rollout's lengths and rewards to trace.jsonl; return no metrics."""
        self.recorder.rollout(taken.facts, taken.scored.rewards.totals, taken.scored.by_function)
        return {}

    def row(self, row: Row) -> None:
        """Replace coefficients.json by the cost model's fit to the times of all steps so far; ``row`` is not read."""
        self.recorder.fit()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRecord(Record):
    """Fills the queue's replay buffer, and returns the metrics of the queue's buffers, generation and weight sync."""

    queue: RolloutQueue

    def rollout(self, index: int, taken: TrainingBatch, result: AdvantageResult) -> Mapping[str, float]:
        """Let the replay buffer keep groups of the rollout; return the metrics ``replay/*`` and ``reroll/*``."""
        return self.queue.remember(taken, result.plain)

    def update(self, update: Update) -> Mapping[str, float]:
        """Return the metrics of generation and weight sync since this method's last call; ``update`` is not read."""
        return self.queue.manager.take_metrics()


@dataclass(frozen=True, slots=True, kw_only=True)
class StallRecord(Record):
    """Warns if many optimizer steps in a row move no weight (observability/stall_warning.py).

    folder:  the run's folder.
    is_main: whether this is the main rank. It alone has metrics.jsonl, so it alone counts the steps
             before a resume.
    """

    watch: StallWarning
    folder: pathlib.Path
    is_main: bool

    def resume(self, restored: RestoredRun) -> None:
        """Count the steps that the run took before it resumed."""
        if self.is_main:
            self.watch.resume(read_metrics(self.folder / METRICS_FILE))

    def row(self, row: Row) -> None:
        """Count one optimizer step, and warn if too many in a row moved no weight."""
        self.watch.observe(row)

    def end(self) -> None:
        """Warn if none of the run's steps moved a weight, unless ``row`` has warned already."""
        self.watch.end()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressRecord(Record):
    """Moves the progress bar on the terminal."""

    progress: ProgressBar

    def row(self, row: Row) -> None:
        """Advance the progress bar by one optimizer step."""
        self.progress.update(row)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord(Record):
    """Saves each rollout's plan as ``plans/rollout_<n>.json`` (``metrics.save_plans``), on the main rank.

    folder: the run's folder.
    """

    folder: pathlib.Path

    def update(self, update: Update) -> Mapping[str, float]:
        """Save the plan of a rollout's optimizer steps; return no metrics."""
        plans = self.folder / "plans"
        plans.mkdir(exist_ok=True)
        (plans / f"rollout_{update.index + 1}.json").write_text(update.decision.plan.to_json())
        return {}

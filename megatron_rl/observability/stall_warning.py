"""The warning of a stalled run: many optimizer steps in a row that moved no weight.

A step moves no weight if no sample has a gradient (the step is then a ghost), or if the gradient is
zero or not finite (``optimizer.on_nonfinite=skip``). Steps of a critic's warm-up, which do not train
the policy, are not counted at all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from megatron_rl.types import StepKind

log = logging.getLogger(__name__)

WAY_OUT = (
    "nothing has been learned in them. Ghosts mean that no sample had an advantage: look at reward/* and "
    "skip/zero_advantage_ratio in metrics.jsonl, and at prompts of another difficulty, more rollout.samples_per_prompt "
    "or another reward (docs/skip.md)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StallCounts:
    """Counts a run's optimizer steps, and those of them since a weight last moved, by their cause.

    steps: the number of all steps of the run so far, without those of a critic's warm-up.
    ghosts: of the steps since a weight last moved, those in which no sample had a gradient.
    zero_gradients: those whose gradient was zero.
    not_finite: those whose gradient was not finite.
    """

    steps: int = 0
    ghosts: int = 0
    zero_gradients: int = 0
    not_finite: int = 0

    @property
    def in_a_row(self) -> int:
        """Return the number of steps since the last one that moved a weight."""
        return self.ghosts + self.zero_gradients + self.not_finite

    def after(self, row: Mapping[str, object]) -> StallCounts:
        """Return the counts after one more step.

        row: the step's row of metrics, as MetricsWriter.write returns it.
        """
        kind = StepKind(row["step_kind"])
        if kind is StepKind.HELD:
            return self
        counted = replace(self, steps=self.steps + 1)
        if kind is StepKind.GHOST:
            return replace(counted, ghosts=self.ghosts + 1)
        norm = row["train/grad_norm"]
        if not math.isfinite(norm):
            return replace(counted, not_finite=self.not_finite + 1)
        if norm == 0:
            return replace(counted, zero_gradients=self.zero_gradients + 1)
        return StallCounts(steps=counted.steps)

    def is_worth_saying(self, warning_steps: int | None) -> bool:
        """Return whether the last ``warning_steps`` steps moved no weight.

        In a run with fewer steps, all of its steps must have moved none.

        warning_steps: if None, the result is False.
        """
        return warning_steps is not None and self.in_a_row > 0 and self.in_a_row >= min(warning_steps, self.steps)

    def __str__(self) -> str:
        which = "all" if self.in_a_row == self.steps else "the last"
        causes = (
            (self.ghosts, "ghosts"),
            (self.zero_gradients, "with a gradient of zero"),
            (self.not_finite, "with a gradient that is not finite"),
        )
        said = ", ".join(f"{count} {cause}" for count, cause in causes if count)
        return f"{which} {self.in_a_row} optimizer steps trained nothing ({said})"


def stall_counts(rows: Iterable[Mapping[str, object]]) -> StallCounts:
    """Return a run's counts after its last row: all its steps, and those since a weight last moved.

    rows: all rows of its metrics.jsonl, in order.
    """
    counts = StallCounts()
    for row in rows:
        counts = counts.after(row)
    return counts


class StallWarning:
    """Warns in the log if ``warning_steps`` steps in a row moved no weight, then at 2, 4, 8, … times as many.

    warning_steps: ``metrics.untrained_warning_steps``; None for no warning.
    """

    def __init__(self, warning_steps: int | None) -> None:
        self._steps, self._next, self._counts = warning_steps, warning_steps, StallCounts()

    def resume(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Count the steps of a resumed run before its checkpoint, without warning.

        rows: the rows of its metrics.jsonl, in order.
        """
        for row in rows:
            self._count(row)

    def observe(self, row: Mapping[str, object]) -> None:
        """Count one step, and log a warning if it is due.

        row: the step's row of metrics, as MetricsWriter.write returns it.
        """
        if self._count(row):
            self._warn()

    def _count(self, row: Mapping[str, object]) -> bool:
        """Count one step; return whether a warning is due.

        row: the step's row of metrics.
        """
        self._counts = self._counts.after(row)
        if self._counts.in_a_row == 0:
            self._next = self._steps
        due = self._next is not None and self._counts.in_a_row == self._next
        if due:
            self._next *= 2
        return due

    def end(self) -> None:
        """Log a warning if no step of the run moved a weight and there were fewer than ``warning_steps`` steps.

        A longer run has been warned by ``observe``.
        """
        if self._counts.is_worth_saying(self._steps) and self._next == self._steps:
            self._warn()

    def _warn(self) -> None:
        log.warning("WARNING: %s: %s", self._counts, WAY_OUT)

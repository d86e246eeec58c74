"""Queue of a batch's tasks: whole groups first, then a failed task's samples alone, which finds the guilty.

A task that fails whole (it raised, ran out of time, or its worker died) is cut into its samples, each a task of its
own. Alone, a sample that raises or runs out of time is guilty; one whose worker dies is tried once more, since the
machine may have been at fault. So a task of n samples costs at most 1 + 2n workers. This module knows no processes.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from megatron_rl.reward.function import Outcome
from megatron_rl.types import Rollout


class Failure(Enum):
    RAISED = "raised"
    OVERDUE = "overdue"
    DIED = "died"


@dataclass(slots=True, kw_only=True, eq=False)
class Split:
    """Records a task that failed whole; ``left`` of its samples are yet to be tried alone."""

    task: Task
    failure: Failure
    error: str
    left: int
    found_guilty: bool = False

    @property
    def is_innocent(self) -> bool:
        """Return whether every one of its samples was tried alone, and none failed."""
        return self.left == 0 and not self.found_guilty


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """Describes one call of one function.

    function: the function's index.
    samples: the samples' indices in the batch.
    split: the failed task that this one is a part of, or None.
    deaths: the number of workers that died on it.
    """

    function: int
    samples: Sequence[int]
    split: Split | None = None
    deaths: int = 0


class TaskQueue:
    """Queues the tasks of a batch and collects their outcomes.

    most_samples: the most samples of a task; a larger group is cut.
    outcomes: [F][S], complete once ``done``.
    """

    def __init__(self, rollouts: Sequence[Rollout], num_functions: int, most_samples: int | None = None) -> None:
        self.rollouts = rollouts
        self.outcomes: list[list[Outcome | None]] = [[None] * len(rollouts) for _ in range(num_functions)]
        self.splits: list[Split] = []
        self.has_failed = False  # a sample that is known to be guilty
        self._left = num_functions * len(rollouts)
        groups = [
            list(indices)
            for _, indices in itertools.groupby(range(len(rollouts)), key=lambda i: id(rollouts[i].prompt))
        ]
        self._waiting = deque(
            Task(function=function, samples=group[start : start + (most_samples or len(group))])
            for group in groups
            for start in range(0, len(group), most_samples or len(group))
            for function in range(num_functions)
        )

    @property
    def done(self) -> bool:
        return self._left == 0

    def next(self) -> Task | None:
        """Return the next task; None where all the rest is under way."""
        return self._waiting.popleft() if self._waiting else None

    def answered(self, task: Task, outcomes: Sequence[Outcome]) -> None:
        for sample, outcome in zip(task.samples, outcomes, strict=True):
            assert self.outcomes[task.function][sample] is None
            self.outcomes[task.function][sample] = outcome
        self._left -= len(task.samples)
        self.has_failed |= any(outcome.error is not None for outcome in outcomes)
        if task.split is not None:
            task.split.left -= 1

    def give_up_rest(self) -> None:
        """Give every sample without an answer an empty one."""
        self.outcomes = [[outcome or Outcome() for outcome in of_function] for of_function in self.outcomes]
        self._waiting.clear()
        self._left = 0

    def failed(self, task: Task, failure: Failure, error: str) -> None:
        if len(task.samples) > 1:
            split = Split(task=task, failure=failure, error=error, left=len(task.samples))
            self.splits.append(split)
            # Before the rest: a sample that takes its whole deadline delays the batch least when it starts early.
            self._waiting.extendleft(
                Task(function=task.function, samples=[sample], split=split) for sample in reversed(task.samples)
            )
        elif failure is Failure.DIED and task.deaths == 0:
            self._waiting.appendleft(Task(function=task.function, samples=task.samples, split=task.split, deaths=1))
        else:
            if task.split is not None:
                task.split.found_guilty = True
            self.answered(task, [Outcome(error=error)])

    def unexplained(self, function: int) -> list[tuple[list[Rollout], str]]:
        """Return (samples, traceback) of each task that raised as a whole, and on none of its samples alone."""
        raised = [split for split in self.splits if split.failure is Failure.RAISED and split.is_innocent]
        return [([self.rollouts[i] for i in s.task.samples], s.error) for s in raised if s.task.function == function]

    def slow_samples(self) -> int | None:
        """Return the size of the smallest task that was overdue while its samples alone were not; None without one."""
        slow = [s for s in self.splits if s.failure is Failure.OVERDUE and s.is_innocent]
        return min((len(s.task.samples) for s in slow), default=None)

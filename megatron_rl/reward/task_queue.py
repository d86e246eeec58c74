"""The queue of a batch's tasks: whole groups first, then the samples of a failed task alone, to find the cause.

A task is one call of one reward function on some samples of a prompt.

1. A task fails as a whole if it raises, runs out of time, or its worker dies. Then it is cut into
   its samples, each a task of its own. A sample that raises or runs out of time alone has failed. A
   sample whose worker dies is tried once more, since the machine may have been at fault. So a task
   of n samples costs at most 1 + 2n workers.
2. If a task takes long (``suspect``), its samples are tried alone while it still runs. The samples'
   results count once the task fails. If the task answers, they are dropped, so that they cannot
   change its answer.
3. For some functions (``lost_is_wrong``), a sample that runs out of time or kills its worker alone
   has not failed, but gets the value 0.0.

This module starts no process and reads no clock.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from megatron_rl.reward.function import Outcome
from megatron_rl.types import Rollout

log = logging.getLogger(__name__)


class Failure(Enum):
    RAISED = "raised"
    OVERDUE = "overdue"
    DIED = "died"


@dataclass(slots=True, kw_only=True, eq=False)
class Split:
    """Records a task (the "whole task") that was cut into its samples, each a task of its own.

    A task is cut once it has failed, or while it still runs if it takes long.

    left: the number of samples whose own result is not stored yet.
    failure: how the whole task failed; None if it has not failed.
    error: the whole task's traceback, or a sentence that says what is wrong.
    found_guilty: whether a sample failed in a task of its own.
    is_moot: whether the whole task was slow and has answered. Its samples' own results are dropped.
    early: (task, result) of each sample whose own task ended while the whole task still ran. They
        count only if the whole task fails.
    """

    task: Task
    left: int
    failure: Failure | None = None
    error: str = ""
    found_guilty: bool = False
    is_moot: bool = False
    early: list[tuple[Task, Outcome]] = field(default_factory=list)

    @property
    def is_innocent(self) -> bool:
        """Return whether each sample of the failed task has been tried in a task of its own, and none failed."""
        return self.left == 0 and not self.found_guilty


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """Describes one call of one reward function on one or more samples.

    function: the function's index.
    samples: the samples' indices in the batch.
    split: if this is one sample of a larger task that failed or takes long: the larger task's
        record. Else None.
    deaths: the number of workers that died on this task.
    """

    function: int
    samples: Sequence[int]
    split: Split | None = None
    deaths: int = 0

    @property
    def is_early(self) -> bool:
        """Return whether one sample is tried early: it is from a larger task that takes long and has not failed."""
        return self.split is not None and self.split.failure is None

    @property
    def is_moot(self) -> bool:
        """Return whether this task's result is not needed: it is one sample of a larger task, which has answered."""
        return self.split is not None and self.split.is_moot


class TaskQueue:
    """Queues the tasks of a batch and collects their outcomes.

    most_samples: the maximum of samples of a task. A larger group is cut into several tasks. None:
        no maximum.
    lost_is_wrong: the indices of functions for which a sample has the value 0.0, not a failure, if
        its call never answers.
    outcomes: [F][S], each function's outcome on each sample. Complete once ``done``.
    """

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        num_functions: int,
        most_samples: int | None = None,
        lost_is_wrong: Collection[int] = (),
    ) -> None:
        self.rollouts = rollouts
        self.outcomes: list[list[Outcome | None]] = [[None] * len(rollouts) for _ in range(num_functions)]
        self.splits: list[Split] = []
        self.has_failed = False  # whether a guilty sample is known
        self._lost_is_wrong = frozenset(lost_is_wrong)
        self._left = num_functions * len(rollouts)  # outcomes that are missing
        self._suspected: dict[Task, Split] = {}  # tasks under way that have taken long
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
        self._early: deque[Task] = deque()

    @property
    def done(self) -> bool:
        return self._left == 0

    @property
    def num_suspected(self) -> int:
        """Return the number of tasks under way that have taken long (``suspect``)."""
        return len(self._suspected)

    @property
    def num_waiting(self) -> int:
        """Return the number of tasks that ``next`` can still hand out."""
        return len(self._waiting)

    @property
    def num_early(self) -> int:
        """Return how many tasks ``next_early`` can still hand out, each one sample of a slow task (``suspect``)."""
        return len(self._early)

    def next(self) -> Task:
        return self._waiting.popleft()

    def next_early(self) -> Task:
        return self._early.popleft()

    def suspect(self, task: Task) -> None:
        """Queue each sample of a task that takes long, to be tried in a task of its own while the task goes on."""
        if len(task.samples) == 1 or task in self._suspected:
            return
        split = self._suspected[task] = Split(task=task, left=len(task.samples))
        self._early.extend(self._alone(split))

    def answered(self, task: Task, outcomes: Sequence[Outcome]) -> None:
        """Store a task's outcomes, one for each of its samples.

        While a slow task runs, its samples are also tried in tasks of their own. Such an outcome is
        kept aside, and stored only if the slow task fails.
        """
        split = self._suspected.pop(task, None)
        if split is not None:
            split.is_moot = True
            self._early = deque(waiting for waiting in self._early if waiting.split is not split)
        if not task.is_early:
            self._note(task, outcomes)
        elif not task.is_moot:
            task.split.early.append((task, *outcomes))

    def _note(self, task: Task, outcomes: Sequence[Outcome]) -> None:
        for sample, outcome in zip(task.samples, outcomes, strict=True):
            assert self.outcomes[task.function][sample] is None
            self.outcomes[task.function][sample] = outcome
        self._left -= len(task.samples)
        self.has_failed |= any(outcome.error is not None for outcome in outcomes)
        if task.split is not None:
            task.split.left -= 1

    def give_up_rest(self) -> None:
        """Give every sample without an outcome an empty Outcome, and empty the queue."""
        self.outcomes = [[outcome or Outcome() for outcome in of_function] for of_function in self.outcomes]
        self._waiting.clear()
        self._early.clear()
        self._suspected.clear()
        self._left = 0

    def failed(self, task: Task, failure: Failure, error: str) -> None:
        """Note that a task failed as a whole, in the way ``failure``, and decide what is tried next.

        A task of several samples is cut into its samples. A single sample is tried once more after
        its worker's first death. Otherwise the sample has failed, with the message ``error``.
        """
        if len(task.samples) > 1:
            self._split(task, failure, error)
        elif task.is_moot:
            return
        elif failure is Failure.DIED and task.deaths == 0:
            again = Task(function=task.function, samples=task.samples, split=task.split, deaths=1)
            (self._early if task.is_early else self._waiting).appendleft(again)
        else:
            if task.split is not None:
                task.split.found_guilty = True
            is_wrong = failure is not Failure.RAISED and task.function in self._lost_is_wrong
            if is_wrong:
                sample = self.rollouts[task.samples[0]].sample_id
                log.warning("sample %s counts as wrong, since it could not be judged: %s", sample, error)
            self.answered(task, [Outcome(value=0.0) if is_wrong else Outcome(error=error)])

    def _split(self, task: Task, failure: Failure, error: str) -> None:
        split = self._suspected.pop(task, None)
        is_new = split is None
        if is_new:
            split = Split(task=task, left=len(task.samples))
        split.failure, split.error = failure, error
        self.splits.append(split)
        # The samples go before other tasks: a sample that takes its whole deadline should start early.
        if is_new:
            self._waiting.extendleft(reversed(self._alone(split)))
            return
        waiting = [part for part in self._early if part.split is split]
        self._early = deque(part for part in self._early if part.split is not split)
        self._waiting.extendleft(reversed(waiting))
        for part, outcome in split.early:
            self._note(part, [outcome])

    def _alone(self, split: Split) -> list[Task]:
        task = split.task
        return [Task(function=task.function, samples=[sample], split=split) for sample in task.samples]

    def unexplained(self, function: int) -> list[tuple[list[Rollout], str]]:
        """Return (samples, traceback) of each task of ``function`` that raised, though no sample of it failed alone."""
        raised = [split for split in self.splits if split.failure is Failure.RAISED and split.is_innocent]
        return [([self.rollouts[i] for i in s.task.samples], s.error) for s in raised if s.task.function == function]

    def slow_samples(self) -> int | None:
        """Return the size of the smallest task that was too slow only as a whole; None if there is none.

        It ran out of time, and none of its samples failed when tried alone.
        """
        slow = [s for s in self.splits if s.failure is Failure.OVERDUE and s.is_innocent]
        return min((len(s.task.samples) for s in slow), default=None)

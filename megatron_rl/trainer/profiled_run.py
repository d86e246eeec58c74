"""A run that records a profile of the steps ``profile.steps``; its recordings begin and end on all ranks alike.

1. For an RL step a recording begins before the step's rollout is taken. For a supervised step it
   begins before the step's first stage.
2. Consecutive steps make one recording. It ends before the first step that ``profile.steps`` leaves
   out. If that step is the first of a rollout, it ends after the checkpoint of the rollout before.
   It ends with the run at the latest.
3. All ranks meet before a recording begins and before it ends; ranks that do not record wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.config import ProfileConfig
from megatron_rl.distributed.collectives import reduce_on_host
from megatron_rl.observability.profile.ranges import Ranges
from megatron_rl.observability.profile.recording import WHOLE, Recording
from megatron_rl.observability.timer import StepTimer
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.trainer.records import Record
from megatron_rl.trainer.run import Run
from megatron_rl.validate import beyond_the_end

log = logging.getLogger(__name__)

STEP_STAGES = ("logprob", "plan", "update")  # the stages of a supervised step; other stages lie between two steps


class Profile:
    """Begins and ends recordings of a profile. Methods are collectives unless they say otherwise.

    models: this rank's policy, and its critic if it holds one.
    recording: this rank's recorder; None on a rank that does not record.
    timer: the step's timer; its times leave out the beginning and the writing of a recording.
    """

    def __init__(
        self,
        settings: ProfileConfig,
        models: Sequence[TrainableModel],
        manager: RolloutManager,
        recording: Recording | None,
        timer: StepTimer,
    ) -> None:
        self.first, self.last = settings.steps
        self._models, self._manager, self._recording, self._timer = models, manager, recording, timer
        self._enter = timer.enter  # the timer's own, which sets no range
        self._began_at: int | None = None  # the step before which the current recording began
        self._ranges: Ranges | None = None

    @property
    def next_step(self) -> int:
        """Return the number of the next optimizer step. Not a collective."""
        return self._models[0].step_index + 1

    @property
    def is_on(self) -> bool:
        """Return whether a recording is under way, on this rank or on others. Not a collective."""
        return self._began_at is not None

    def covers(self, first: int, last: int) -> bool:
        """Return whether a profile is wanted of one of the steps ``first`` to ``last``. Not a collective."""
        return first <= self.last and last >= self.first

    def record(self, wanted: bool) -> None:
        """Begin a recording if ``wanted`` and none is under way; end the one under way if not ``wanted``."""
        if wanted == self.is_on:
            return
        began_s = time.perf_counter()
        with self._enter("profile"):
            if wanted:
                self._began_at = self.next_step
                if self._recording is not None:
                    self._recording.start()
            else:
                self._take_ranges_off()
            reduce_on_host(torch.zeros(1))
            if not wanted:
                self.end()
            elif self._recording is not None:
                self._ranges = self._put_ranges(self._recording)
        self._timer.started += time.perf_counter() - began_s

    def end(self) -> None:
        """End the current recording, if there is one, and write its files. Not a collective."""
        self._take_ranges_off()
        began_at, self._began_at = self._began_at, None
        if began_at is not None and self._recording is not None:
            self._recording.stop(began_at, self._models[0].step_index)

    def _take_ranges_off(self) -> None:
        if self._ranges is not None:
            self._ranges.take_off()
            self._ranges = None

    def mark(self, name: str) -> AbstractContextManager[None]:
        """Return a context that marks its block in the profile as a range with this name. Not a collective.

        It does nothing while nothing is recorded.
        """
        return contextlib.nullcontext() if self._ranges is None else self._ranges.mark(name)

    def _put_ranges(self, recording: Recording) -> Ranges:
        ranges, worker = Ranges(recording.mark, WHOLE), self._manager.worker
        for model, prefix in zip(self._models, ("", "critic "), strict=False):
            ranges.put_around_model(model, prefix)
        ranges.put_around(worker, "generate", "generate")
        if worker.score is not None:
            ranges.put_around(worker, "score", "score")
        ranges.put_around(worker.engine, "load_weights", "send weights")
        return ranges


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileEnd(Record):
    """Ends the current recording when the run ends, also by an error."""

    profile: Profile

    def end(self) -> None:
        """End the current recording, if there is one, and write its files."""
        self.profile.end()


@dataclasses.dataclass(kw_only=True, eq=False)
class ProfiledRun(Run):
    """Does what a Run does, and records a profile of chosen optimizer steps."""

    profile: Profile

    def __post_init__(self) -> None:
        self.records.others = (*self.records.others, ProfileEnd(profile=self.profile))
        enter, self._supervised = self.timer.enter, False
        self.timer.enter = lambda stage: self._stage(stage, enter)

    @contextlib.contextmanager
    def _stage(self, stage: str, enter: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
        """Time a stage of the step, and mark it in the profile as a range of the same name.

        Before the stage, a recording begins or ends if ``profile.steps`` asks for that.

        enter: a function that takes the stage's name and returns the timer's own context around it.
        """
        if stage == "update" or self._supervised:
            step, begins = self.profile.next_step, stage in STEP_STAGES
            self.profile.record(self.profile.covers(step, step) and (begins or self.profile.is_on))
        with enter(stage), self.profile.mark(f"update step={self.profile.next_step}" if stage == "update" else stage):
            yield

    def begin(self) -> bool:
        """Do what ``Run.begin`` does, and record the supervised steps that ``profile.steps`` asks for."""
        self._supervised = self.start is not None
        left = super().begin()
        self._supervised = False
        self.profile.record(False)
        return left

    def take(self, index: int) -> TrainingBatch:
        """Wait for a rollout as ``Run.take`` does; first begin a recording if one of its steps is to be recorded."""
        first = self.profile.next_step
        self.profile.record(self.profile.covers(first, first + self.queue.settings.steps_per_rollout - 1))
        return super().take(index)

    def save_if_due(self, num_rollouts: int) -> bool:
        """Save a checkpoint as ``Run.save_if_due`` does; then end the recording unless it covers the next step."""
        left = super().save_if_due(num_rollouts)
        step = self.profile.next_step
        if left or not (self.profile.covers(step, step) and self.queue.has(num_rollouts)):
            self.profile.record(False)
        return left


def profiled(
    run: Run, settings: ProfileConfig, models: Sequence[TrainableModel], folder: pathlib.Path, num_steps: int
) -> ProfiledRun:
    """Return a run that records a profile, made of the objects of ``run``. Not a collective.

    models: this rank's policy, and its critic if it holds one.
    folder: the run's folder.
    num_steps: the optimizer steps of the whole run, as far as known.
    """
    topology = run.backend.topology
    if topology.is_main and (warning := beyond_the_end(settings, num_steps)):
        log.warning("%s", warning)
    recording = None
    if topology.rank in settings.ranks:
        recording = Recording(settings, folder / "profile", topology.rank, topology.who(topology.rank))
    profile = Profile(settings, models, run.queue.manager, recording, run.timer)
    parts = {field.name: getattr(run, field.name) for field in dataclasses.fields(Run)}
    return ProfiledRun(**parts, profile=profile)

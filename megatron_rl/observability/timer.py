"""The timer of an optimizer step's stages, such as rollout and update."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from megatron_rl.distributed.platform import HOST

STEP = "step"  # the stage that ``take`` reports: a whole optimizer step


def _nobody(stage: str, started_s: float, seconds: float) -> None:
    """Do nothing with an interval: the default of StepTimer's argument ``heard``."""


class StepTimer:
    """Sums the seconds of each stage since the last ``take``, which ends a step.

    So a rollout's first step includes the seconds of generating and scoring before it.

    enter: a function that takes a stage's name and returns a context manager around the stage
        (``Watchdog.stage``).
    heard: a listener, called at the end of each interval with its stage, its start by
        ``time.perf_counter``, and its seconds.
    """

    def __init__(
        self,
        enter: Callable[[str], contextlib.AbstractContextManager[None]],
        heard: Callable[[str, float, float], None] = _nobody,
    ) -> None:
        self.enter, self.heard = enter, heard
        self.restart()

    def restart(self) -> None:
        self.seconds: dict[str, float] = {}
        self.started = time.perf_counter()

    def add(self, stage: str, seconds: float, *, before_s: float = 0.0) -> None:
        """Add a stage's seconds, measured by the caller, to the step's sums, and pass them to the listener ``heard``.

        before_s: how many seconds ago the stage ended.
        """
        self._sum(stage, seconds)
        if seconds:
            self.heard(stage, time.perf_counter() - before_s - seconds, seconds)

    @contextlib.contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        with self.enter(stage):
            HOST.synchronize()
            started = time.perf_counter()
            yield
            HOST.synchronize()
            seconds = time.perf_counter() - started
            self._sum(stage, seconds)
            self.heard(stage, started, seconds)

    @contextlib.contextmanager
    def follow(self, stage: str) -> Iterator[None]:
        """Return a context that times its block as ``stage``, and passes the time only to the listener ``heard``.

        The result of ``take`` does not include it.
        """
        with self.enter(stage):
            started = time.perf_counter()
            yield
            self.heard(stage, started, time.perf_counter() - started)

    def report(self, stage: str, seconds: float) -> None:
        """Pass a stage that just ended to the listener ``heard``. The result of ``take`` does not include it."""
        self.heard(stage, time.perf_counter() - seconds, seconds)

    def take(self) -> dict[str, float]:
        """Return {metric: seconds} since the last call, ``time/<stage>_s`` and ``time/step_s``; start the next step."""
        times = {f"time/{stage}_s": seconds for stage, seconds in self.seconds.items()}
        started = self.started
        self.restart()
        times[f"time/{STEP}_s"] = self.started - started
        self.heard(STEP, started, self.started - started)
        return times

    def _sum(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

"""Measures the seconds of an optimizer step, stage by stage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from megatron_rl.distributed.platform import HOST


class StepTimer:
    """Sums seconds by stage since the last ``take``; a rollout's first step includes the seconds before it.

    enter: called with the name of each measured stage; returns a context manager (``Watchdog.stage``).
    """

    def __init__(self, enter: Callable[[str], contextlib.AbstractContextManager[None]]) -> None:
        self.enter = enter
        self.restart()

    def restart(self) -> None:
        self.seconds: dict[str, float] = {}
        self.started = time.perf_counter()

    def add(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    @contextlib.contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        with self.enter(stage):
            HOST.synchronize()
            started = time.perf_counter()
            yield
            HOST.synchronize()
            self.add(stage, time.perf_counter() - started)

    def take(self) -> dict[str, float]:
        """Return ``time/<stage>_s`` and ``time/step_s`` of this optimizer step, and start the next."""
        times = {f"time/{stage}_s": seconds for stage, seconds in self.seconds.items()}
        times["time/step_s"] = time.perf_counter() - self.started
        self.restart()
        return times

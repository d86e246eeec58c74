"""The watchdog's record of a rank: its stage, its main thread's position, whether that thread waits for others."""

from __future__ import annotations

import linecache
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from megatron_rl.distributed.collectives import num_gathers

SETTLE_S = 2.0  # longest wait after a failed collective for news of a rank that raised or died
ANSWER_S = 3.0  # longest wait for the watch threads to report their main threads' positions
BETWEEN = "between stages"
TORCH = os.path.dirname(torch.__file__) + os.sep
TORCH_DISTRIBUTED = os.path.join(TORCH, "distributed") + os.sep
PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
WAITING_CALLS = (".wait(", "synchronize(", ".item()", ".tolist()", ".cpu()")  # on CUDA the last four wait for kernels
LOOKS = 240  # looks within a long wait: so many in a row do not meet different waits at one place by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Names the guilty rank (None if none is known) and describes its failure in ``text``."""

    rank: int | None
    text: str


@dataclass(slots=True, kw_only=True, eq=False)
class RankState:
    """Holds what the watchdog's server on rank 0 knows of one rank.

    who: the rank's name for messages.
    stage: the part of the run in which its main thread is now, such as "update".
    number: how many stages the rank has entered; a stage inside another one does not count.
    since: the entry into ``stage``, in seconds of the server's monotonic clock.
    lost: the error of the rank's failed collective; None if none failed.
    ended: True after the rank said that it leaves, or after its connection closed.
    answer: what the rank said when asked where its main thread is; None if it has not answered. "at"
        is the position, "waits" whether the thread waits for other ranks, "left" whether the rank
        has failed or ended.
    """

    rank: int
    who: str
    stage: str = BETWEEN
    number: int = 0
    since: float = field(default_factory=time.monotonic)
    lost: str | None = None
    ended: bool = False
    answer: Mapping[str, object] | None = None

    def doing(self) -> str:
        return f"in {self.stage!r} for {time.monotonic() - self.since:.1f} s"

    def gone(self) -> Cause:
        """Return the cause to report if the connection closed, but the rank did not say that it leaves."""
        last = f"its last reported stage is {self.stage!r}, {time.monotonic() - self.since:.1f} s before"
        fault = "its process ended without reporting an error (killed?)"
        return Cause(rank=self.rank, text=f"{self.who} is gone: {fault}; {last}")

    def place(self) -> str:
        return self.doing() + (f", at {self.answer['at']}" if self.answer else "")


class SlowStages:
    """Reports each rank's stage of the run, such as "update", when one rank has been in its stage for long.

    after_s: seconds in a stage until the first report; the next come at 2, 4, 8, … times as many.
        0 never reports.
    say: a function that takes the report, one line of text, in the watch thread.
    """

    def __init__(self, after_s: float, say: Callable[[str], None]) -> None:
        self._after_s, self._say = after_s, say
        self._next_s = after_s

    def look(self, ranks: Collection[RankState], now: float) -> None:
        """Report the stages of ``ranks`` if a report is due.

        now: seconds of the same clock as ``RankState.since``.
        """
        running = [rank for rank in ranks if not rank.ended]
        longest_s = max((now - rank.since for rank in running), default=0.0)
        if longest_s < self._after_s:
            self._next_s = self._after_s
        if not self._after_s or longest_s < self._next_s:
            return
        while self._next_s <= longest_s:
            self._next_s *= 2.0
        by_stage: dict[str, list[RankState]] = {}
        for rank in sorted(running, key=lambda rank: rank.since):
            by_stage.setdefault(rank.stage, []).append(rank)
        parts = [f"in {stage!r} for {now - there[0].since:.0f} s: {_ranks(there)}" for stage, there in by_stage.items()]
        self._say("; ".join(parts))


def _ranks(ranks: Collection[RankState]) -> str:
    """Return names of ranks, as "ranks 0-3, 6"; a single rank is named by its ``RankState.who``."""
    if len(ranks) == 1:
        return next(iter(ranks)).who
    runs: list[list[int]] = []
    for number in sorted(rank.rank for rank in ranks):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "ranks " + ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def where_is(thread: int, *, in_own_code: bool = False) -> tuple[str, bool]:
    """Return (position, whether the thread waits there for other ranks). The position is "file:line function".

    If the thread is in torch's files, the position is the line outside them that led there.

    thread: the thread's identifier.
    in_own_code: whether the thread is in a user's function. Then a line of the user's own files is
        not counted as a wait, even if it calls ``.wait()`` or ``.item()``.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its end", False
    file = frame.f_code.co_filename
    line = linecache.getline(file, frame.f_lineno)
    waits = any(call in line for call in WAITING_CALLS) and (not in_own_code or file.startswith((TORCH, PACKAGE)))
    waits = waits or file.startswith(TORCH_DISTRIBUTED)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}", waits


class LongWait:
    """Finds a thread that has waited for ``after_s`` seconds in one call.

    Call ``look`` every ``look_s`` (an attribute) seconds. A wait counts as the same wait while each
    ``look`` finds the same function call at the same instruction, with no ``gather_json`` begun
    since. So a loop of short waits is not one long wait.

    thread: the thread's identifier.
    """

    def __init__(self, thread: int, after_s: float) -> None:
        self.thread, self.after_s, self.look_s = thread, after_s, after_s / LOOKS
        self._call: tuple[int, int, int] | None = None  # the frame's id (the frame itself would keep its tensors alive)
        self._since = 0.0

    def look(self, now: float, *, in_own_code: bool = False) -> str | None:
        """Return where in the code the thread waits, if the wait has lasted ``after_s`` seconds; else None.

        now: monotonic seconds.
        in_own_code: whether the thread is in a user's function, as for ``where_is``.
        """
        frame = sys._current_frames().get(self.thread)
        call = None if frame is None else (id(frame), frame.f_lasti, num_gathers())
        del frame
        position, waits = where_is(self.thread, in_own_code=in_own_code)
        if not waits or call != self._call:
            self._call, self._since = (call if waits else None), now
            return None
        return position if now - self._since >= self.after_s else None

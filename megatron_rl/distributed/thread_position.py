"""The position of a thread, as another thread sees it, and whether it waits there for other ranks."""

from __future__ import annotations

import linecache
import os
import sys

import torch

from megatron_rl.distributed.collectives import num_gathers

TORCH = os.path.dirname(torch.__file__) + os.sep
TORCH_DISTRIBUTED = os.path.join(TORCH, "distributed") + os.sep
PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
WAITING_CALLS = (".wait(", "synchronize(", ".item()", ".tolist()", ".cpu()")  # the last four wait for kernels, on CUDA
LOOKS = 240  # in the time of a long wait: so many in a row do not meet different waits at one place by chance


def where_is(thread: int, *, in_own_code: bool = False) -> tuple[str, bool]:
    """Return a thread's position ("file:line function" outside torch), and whether it waits there for other ranks.

    in_own_code: whether it is in a user's function, whose own lines wait for no rank, though they may look like it.
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
    """Finds the wait of a thread that lasts ``after_s`` seconds: the same call, at every look.

    A loop that waits often begins each wait in another frame, at another instruction or after another gather; looks
    are ``look_s`` apart.
    """

    def __init__(self, thread: int, after_s: float) -> None:
        self.thread, self.after_s, self.look_s = thread, after_s, after_s / LOOKS
        self._call: tuple[int, int, int] | None = None  # the frame's id (the frame itself would keep its tensors alive)
        self._since = 0.0

    def look(self, now: float, *, in_own_code: bool = False) -> str | None:
        """Return the position of a wait that has lasted ``after_s`` at ``now``, monotonic seconds; None elsewhere."""
        frame = sys._current_frames().get(self.thread)
        call = None if frame is None else (id(frame), frame.f_lasti, num_gathers())
        del frame
        position, waits = where_is(self.thread, in_own_code=in_own_code)
        if not waits or call != self._call:
            self._call, self._since = (call if waits else None), now
            return None
        return position if now - self._since >= self.after_s else None

"""A limit on the time of user's code that runs before the watch is open: its import, and the check of its contract."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator


@contextlib.contextmanager
def time_limit(what: str, deadline_s: float | None) -> Iterator[None]:
    """End this process where the body takes longer than ``deadline_s``, and say what, and where it stood.

    what: names the body, for the message.
    deadline_s: ``run.deadline_s``, in seconds; None: no limit.

    Nothing can interrupt a user's function. A call that never gives the interpreter's lock back is not ended.
    """
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(threading.get_ident(), ended, what, deadline_s), daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()


def _watch(thread: int, ended: threading.Event, what: str, deadline_s: float | None) -> None:
    if ended.wait(deadline_s):
        return
    frame = sys._current_frames().get(thread)
    stack = "" if frame is None else "".join(traceback.format_stack(frame))
    print(
        f"megatron_rl: rank {os.environ.get('RANK', '0')} has been in {what} for longer than run.deadline_s="
        f"{deadline_s:g} s; mend the function that does not return, or raise run.deadline_s. It stood at:\n{stack}",
        file=sys.__stderr__,
        flush=True,
    )
    os._exit(1)

"""A time limit for work before the watchdog is open: calls of a user's code, and the building of process groups."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator

OWN = "mend the function that does not return, or raise run.deadline_s"


@contextlib.contextmanager
def time_limit(what: str, deadline_s: float | None, *, grace_s: float = 0.0, way_out: str = OWN) -> Iterator[None]:
    """Return a context that ends this process, with a message, if its block outlasts ``deadline_s + grace_s``.

    what: the block's name for the message.
    deadline_s: ``run.deadline_s``, in seconds; None sets no limit.
    grace_s: seconds beyond the deadline, so that a time-out within the block comes first.
    way_out: the advice in the message. With the default advice, for a user's code, the message
        shows the code's stack too.

    The process ends because nothing can interrupt a user's function. A call that never releases the
    interpreter's lock is not ended.
    """
    ended = threading.Event()
    given = (threading.get_ident(), ended, what, deadline_s, grace_s, way_out)
    watch = threading.Thread(target=_watch, args=given, daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()


def _watch(
    thread: int, ended: threading.Event, what: str, deadline_s: float | None, grace_s: float, way_out: str
) -> None:
    if ended.wait(None if deadline_s is None else deadline_s + grace_s):
        return
    frame = sys._current_frames().get(thread) if way_out == OWN else None
    stack = "" if frame is None else f". It stood at:\n{''.join(traceback.format_stack(frame))}"
    print(
        f"megatron_rl: rank {os.environ.get('RANK', '0')} has been in {what} for longer than run.deadline_s="
        f"{deadline_s:g} s; {way_out}{stack}",
        file=sys.__stderr__,
        flush=True,
    )
    os._exit(1)

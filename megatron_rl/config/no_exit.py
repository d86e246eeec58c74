"""Makes an end of the process within a user's function an error, as any other fault of that function."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

_INSTALLING = threading.Lock()
_num_inside = 0
_real_exit: Callable[[int], None] = os._exit


class _Here(threading.local):
    """Holds, for each thread, the id of the process whose end it may not cause; None outside every body."""

    process: int | None = None


_HERE = _Here()


@contextlib.contextmanager
def exit_is_an_error() -> Iterator[None]:
    """Turn ``os._exit`` in the body into SystemExit, as ``sys.exit`` raises it; the caller takes both for a failure.

    ``os._exit`` would end the run with the exit code of the function's choice, 0 among them. It still ends a process
    that the body forked, and works in all other threads, so that the watchdog can end this process.
    """
    global _num_inside, _real_exit
    outer, _HERE.process = _HERE.process, os.getpid()
    with _INSTALLING:
        if _num_inside == 0:
            _real_exit, os._exit = os._exit, _refuse
        _num_inside += 1
    try:
        yield
    finally:
        _HERE.process = outer
        with _INSTALLING:
            _num_inside -= 1
            if _num_inside == 0:
                os._exit = _real_exit


def _refuse(code: int) -> None:
    if _HERE.process != os.getpid():
        return _real_exit(code)
    raise SystemExit(f"os._exit({code!r}) was called")

"""The record of requests to leave that this pod gets, from the first moment on.

The kernel drops a signal to a container's first process if that process has no handler for it, and
Kubernetes sends SIGTERM once. So the handlers are installed before anything else is imported.
"""

from __future__ import annotations

import signal

TOLD_BY = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_told: list[signal.Signals] = []


def listen() -> None:
    """Record each request to leave from now on."""
    for number in TOLD_BY:
        signal.signal(number, note)


def note(number: int, _frame: object) -> None:
    """Record a request; this is the signals' handler."""
    _told.append(signal.Signals(number))


def asked() -> signal.Signals | None:
    """Return the first request to leave; None if there was none."""
    return _told[0] if _told else None

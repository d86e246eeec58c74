"""The record of the signals that tell this pod to leave, kept from the process's first moment on.

The kernel drops a signal to a container's first process if that process has no handler for it.
Kubernetes sends SIGTERM only once. So the handlers are installed before anything else is imported.
"""

from __future__ import annotations

import signal

TOLD_BY = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_told: list[signal.Signals] = []


def listen() -> None:
    """Install handlers that record each SIGTERM, SIGUSR1 and SIGINT from now on."""
    for number in TOLD_BY:
        signal.signal(number, note)


def note(number: int, _frame: object) -> None:
    """Record a signal; this function is the handler that ``listen`` installs."""
    _told.append(signal.Signals(number))


def asked() -> signal.Signals | None:
    """Return the first recorded signal that tells this pod to leave; None if there was none."""
    return _told[0] if _told else None

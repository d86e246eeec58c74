"""Lengthens the tests' waits: each bound is multiplied by MEGATRON_RL_TEST_PATIENCE, which tests/README.md names.

A bound ends a hang; no test measures a machine by one. On a host that is shared with other work, 3 leaves three times
as long.
"""

import os
import time
from collections.abc import Callable

VARIABLE = "MEGATRON_RL_TEST_PATIENCE"
HANG_S = 120.0  # what takes milliseconds on an idle host, and starts processes at most, has hung by then on any other


def factor() -> float:
    """Read the variable's number, 1 where it is not set.

    Raises ValueError where it is no number of at least 1.
    """
    given = os.environ.get(VARIABLE, "1")
    try:
        found = float(given)
    except ValueError:
        found = 0.0
    if not 1.0 <= found < float("inf"):
        raise ValueError(
            f"{VARIABLE}={given!r} must be a number of at least 1; 3 leaves every wait three times as long"
        )
    return found


def patient(seconds: float) -> float:
    """Return ``seconds`` on an idle host, and more of them on one that was said to be slow."""
    return seconds * factor()


def until(condition: Callable[[], object], seconds: float = HANG_S) -> bool:
    """Wait until ``condition()`` is true, for ``patient(seconds)`` at most; return whether it was.

    Example: ``assert until(path.exists)``.
    """
    ends_at = time.monotonic() + patient(seconds)
    while not condition():
        if time.monotonic() > ends_at:
            return bool(condition())
        time.sleep(0.01)
    return True

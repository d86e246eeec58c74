"""The status.json of a run's folder: the steps that the run is to take, and how it ended.

A killed process writes no end. The lock of the run's folder tells whether a run with the status
"running" still lives.
"""

from __future__ import annotations

import contextlib
import json
import logging
import pathlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from megatron_rl.distributed.atomic_file import replace_text
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.json_text import field, read_object

log = logging.getLogger(__name__)
STATUS_FILE = "status.json"


class RunState(StrEnum):
    """Names the state of a run, as in its status.json.

    PREEMPTED: told to leave, with a checkpoint saved. STOPPED: by Ctrl-C. FAILED: by an error.
    """

    RUNNING = "running"
    ENDED = "ended"
    PREEMPTED = "preempted"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Holds a run's status.

    total_steps: optimizer steps of the whole run; under ``train.epochs`` the least possible number.
    at: when the status was written, in seconds since 1970.

    Example: ``{"state": "ended", "total_steps": 940, "at": 1795813200.0}``.
    """

    state: RunState
    total_steps: int
    at: float


def write_status(folder: pathlib.Path, state: RunState, total_steps: int) -> None:
    """Write the current status. Raises OSError."""
    text = json.dumps({"state": state.value, "total_steps": total_steps, "at": time.time()})
    replace_text(folder / STATUS_FILE, text + "\n")


def read_status(folder: pathlib.Path) -> RunStatus | None:
    """Return a folder's status; None if it has none. Raises ConfigError for a malformed file."""
    path = folder / STATUS_FILE
    if not path.exists():
        return None
    written, where = read_object(path), str(path)
    state = field(written, "state", str, where)
    if state not in [*RunState]:
        raise ConfigError(f"{where}: state must be one of {', '.join(RunState)}, and it is {quoted(state)}; delete it")
    return RunStatus(
        state=RunState(state),
        total_steps=field(written, "total_steps", int, where, least=0),
        at=field(written, "at", float, where),
    )


@contextlib.contextmanager
def kept_status(folder: pathlib.Path, total_steps: int, *, is_main: bool, leaves: Callable[[], bool]) -> Iterator[None]:
    """Write at the block's end how the run ended; on the main rank alone. Not a collective.

    leaves: returns whether the run was told to leave, with a checkpoint saved.
    """
    state = RunState.FAILED
    try:
        yield
        state = RunState.PREEMPTED if leaves() else RunState.ENDED
    except KeyboardInterrupt:
        state = RunState.STOPPED
        raise
    finally:
        if is_main:
            try:
                write_status(folder, state, total_steps)
            except OSError as error:
                log.error("%s was not written (%s); the run is not touched by it", folder / STATUS_FILE, error)

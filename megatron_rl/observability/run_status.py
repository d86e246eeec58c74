"""The status.json of a run's folder: the number of steps that the run is to take, and how it ended.

A process that was killed leaves the state "running". Whether such a run is still alive shows in the
lock of its folder.
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

    PREEMPTED: the run was told to leave, and saved a checkpoint.
    STOPPED: Ctrl-C ended the run.
    FAILED: an error ended the run.
    """

    RUNNING = "running"
    ENDED = "ended"
    PREEMPTED = "preempted"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Holds the content of a status.json.

    total_steps: the number of optimizer steps of the whole run; under ``train.epochs`` the least
        possible number.
    at: when the file was written, in seconds since 1970.

    Example: ``{"state": "ended", "total_steps": 940, "at": 1795813200.0}``.
    """

    state: RunState
    total_steps: int
    at: float


def write_status(folder: pathlib.Path, state: RunState, total_steps: int) -> None:
    """Write status.json with this state and the current time. Raises OSError if it cannot be written."""
    text = json.dumps({"state": state.value, "total_steps": total_steps, "at": time.time()})
    replace_text(folder / STATUS_FILE, text + "\n")


def read_status(folder: pathlib.Path) -> RunStatus | None:
    """Return the status in a run's folder; None if it has no status.json. Raises ConfigError for a malformed file."""
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
    """Return a context around a run; at its end the main rank writes to status.json how the run ended.

    Not a collective.

    leaves: a function that returns whether the run was told to leave and has saved a checkpoint.
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

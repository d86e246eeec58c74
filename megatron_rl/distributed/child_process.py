"""A process of a rank's own: it ends with its rank, and is no part of the trainer's world."""

from __future__ import annotations

import ctypes
import os
import pathlib
import signal
from collections.abc import Mapping

# What torchrun and SLURM tell a rank would make its child join the trainer's world.
RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMPI_COMM_WORLD_SIZE",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
)
PR_SET_PDEATHSIG = 1
_ASKS_TO_LEAVE = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """``given`` without the trainer's world, and with this package on PYTHONPATH."""
    kept = {
        name: value
        for name, value in given.items()
        if name not in RANK_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    kept["PYTHONPATH"] = os.pathsep.join(
        [str(pathlib.Path(__file__).parents[2]), *filter(None, [given.get("PYTHONPATH")])]
    )
    return kept


def end_with_parent(parent: int) -> None:
    """A rank that is killed takes this process along; one that is asked to leave finishes its step first, and needs it
    until then.

    Linux sends the signal when the *thread* that started this process ends: start it from one that lives as long as the
    rank. The signals are handled by nothing rather than ignored, and not at all after a fork: what is ignored, a
    process started from here would ignore too, and could not be terminated.
    """
    for number in _ASKS_TO_LEAVE:
        signal.signal(number, _stay)
    os.register_at_fork(after_in_child=_leave_when_asked)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _stay(number: int, frame: object) -> None:
    return


def _leave_when_asked() -> None:
    for number in _ASKS_TO_LEAVE:
        if signal.getsignal(number) is _stay:
            signal.signal(number, signal.SIG_DFL)

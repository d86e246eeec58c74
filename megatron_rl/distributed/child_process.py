"""Child processes of a rank: each ends with its rank, and does not join the trainer's process group."""

from __future__ import annotations

import ctypes
import os
import pathlib
import re
import signal
from collections.abc import Mapping

# Variables of torchrun, MPI and SLURM. A child that inherited them would join the trainer's world.
LAUNCHER_VARIABLES = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_RANK|ROLE_NAME|ROLE_WORLD_SIZE|"
    r"MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|TORCH_NCCL_.*|PMI_.*|PMIX_.*|OMPI_.*|SLURM_(PROCID|NTASKS|LOCALID)"
)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before any fork
_ASKS_TO_LEAVE = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return ``inherited`` without the launcher's variables (RANK, MASTER_ADDR, …), with this package on PYTHONPATH.

    A child with the launcher's variables would join the trainer's process group.
    """
    variables = {name: value for name, value in inherited.items() if not LAUNCHER_VARIABLES.fullmatch(name)}
    variables["PYTHONPATH"] = os.pathsep.join(
        [str(pathlib.Path(__file__).parents[2]), *filter(None, [inherited.get("PYTHONPATH")])]
    )
    return variables


def end_with_parent(parent: int) -> None:
    """End this process when its rank is killed, but not when the rank is asked to leave.

    parent: the rank's process id. After a request to leave the rank finishes its step, and needs
        this process until then.

    Linux sends SIGKILL when the *thread* that started this process ends. So start it from a thread
    that lives as long as the rank. Requests to leave are signals (SIGTERM, SIGUSR1, SIGINT). They
    get an empty handler here. In a process forked from here, a hook sets the default handler. If
    this process ignored the signals, programs that it starts would ignore them too, and could not
    be terminated.
    """
    for number in _ASKS_TO_LEAVE:
        signal.signal(number, _stay)
    os.register_at_fork(after_in_child=_leave_when_asked)
    signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def end_with_launcher() -> None:
    """End this process when torchrun, its parent, is killed. If torchrun ends in another way, it ends its ranks itself.

    Without torchrun the parent may be a login shell, so the process lives on when its parent ends.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal_at_parents_end(signal.SIGKILL)


def signal_at_parents_end(number: int) -> None:
    """Have the kernel send this process the signal ``number`` when the thread that started it ends (Linux)."""
    _LIBC.prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Have the kernel make this process the parent of each descendant whose own parent ends (Linux)."""
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)


def _stay(number: int, frame: object) -> None:
    return


def _leave_when_asked() -> None:
    for number in _ASKS_TO_LEAVE:
        if signal.getsignal(number) is _stay:
            signal.signal(number, signal.SIG_DFL)

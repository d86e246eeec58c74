"""A rank that ends where no watch is open: while the run is put up (imports, groups, weights) or taken down.

Each rank leaves its process id in the job's store as soon as it has met the others. A rank whose
collective or store fails looks there for the ranks of its own host, and names those whose process
is gone; of other hosts it knows none.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import socket
import time
import traceback
import uuid
from collections.abc import Iterator

import psutil
import torch.distributed as dist

from megatron_rl.distributed.time_limit import time_limit
from megatron_rl.errors import PeerError, RunError, shortened

SETTLE_S = 1.0  # a killed process closes its connections before it is gone
NAMESPACE = "/proc/self/ns/pid"  # of Linux alone
MOST_RANKS = 64  # of one host, of which the store is asked
ADVICE = (
    "its own log and the launcher's say how it ended (killed for want of memory?); then start the same command again"
)
UNNAMED = "another rank, which cannot be named"
NO_ANSWER = f"a rank that met the others does not answer, or has ended: {ADVICE}"
GRACE_S = 5.0  # beyond the deadline, which torch keeps by itself but where a connection is accepted and never answered
NCCL_GRACE_S = 60.0  # beyond the deadline, for the watchdog to find the cause before NCCL ends the process
_met: list[tuple[dist.Store, int]] = []  # the store of the job that this process belongs to, and its rank


def is_peer_failure(error: BaseException) -> bool:
    """Return whether a collective raised ``error`` for want of another rank; gloo raises plain RuntimeErrors."""
    return isinstance(error, dist.DistError | PeerError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def note_process(store: dist.Store, rank: int) -> None:
    """Tell the job's other ranks which process this is."""
    _met[:] = [(store, rank)]
    store.set(f"process/{rank}", f"{_host()} {os.getpid()}")


def _host() -> str:
    """Return a name of this host, and of the numbers that its processes have here: containers may share a host."""
    numbers = os.readlink(NAMESPACE) if os.path.exists(NAMESPACE) else "one"
    return f"{socket.gethostname()}/{uuid.getnode()}/{numbers}"


def group_timeout(backend: str, deadline_s: float) -> datetime.timedelta:
    """Return the time-out of a process group: ``deadline_s``, and NCCL_GRACE_S more for NCCL's."""
    return datetime.timedelta(seconds=deadline_s + (NCCL_GRACE_S if backend == "nccl" else 0.0))


def joining(backend: str, deadline_s: float) -> contextlib.AbstractContextManager[None]:
    """End this process where the groups of the body are not built in time.

    gloo (torch 2.13) tries five times, each for the group's time-out, to reach a rank that met the
    others and ended.
    """
    grace_s = group_timeout(backend, GRACE_S).total_seconds()
    return time_limit("joining the other ranks' process groups", deadline_s, grace_s=grace_s, way_out=NO_ANSWER)


@contextlib.contextmanager
def losses_named() -> Iterator[None]:
    """Raise PeerError, in one line that says who is gone, where a collective or the job's store fails in the body."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RunError) or not is_peer_failure(error):
            raise
        raise _loss(error) from error


def _loss(error: RuntimeError) -> PeerError:
    reason = (str(error).splitlines() or [type(error).__name__])[0].partition(". This is typically")[0]
    reason = re.sub(r"^\[\S*/gloo/\S*\] ", "gloo: ", reason)
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "megatron_rl" in frame.filename]
    place = f", at {os.path.basename(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}" if own else ""
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return PeerError(
        f"rank {rank} of {world_size} lost {gone()} while the run was put up or taken down{place}: "
        f"{shortened(reason, 200)}; {ADVICE}"
    )


def gone() -> str:
    """Return the names of this host's ranks whose process has ended, or that none could be named.

    Not while another thread waits for the store: it answers one at a time.
    """
    if not _met:
        return UNNAMED
    store, own = _met[0]
    until = time.monotonic() + SETTLE_S
    while True:
        try:
            ended = [rank for rank in _ranks_here(own) if _has_ended(store, rank)]
        except RuntimeError:  # torch's DistError
            if own and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                return "rank 0 (it keeps the job's store, which is gone)"
            return "another rank (the job's store is gone too)"
        if ended:
            return f"rank {', '.join(map(str, ended))} (its process on this host has ended)"
        if time.monotonic() > until:
            return UNNAMED
        time.sleep(0.02)


def _ranks_here(own: int) -> list[int]:
    """Return the job's other ranks on this host, by the launcher's variables: a host's ranks stand in a row."""
    first = own - int(os.environ.get("LOCAL_RANK", "0"))
    count = min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), MOST_RANKS)
    return [rank for rank in range(first, first + count) if rank != own]


def _has_ended(store: dist.Store, rank: int) -> bool:
    if not store.check([f"process/{rank}"]):
        return False
    host, _, pid = store.get(f"process/{rank}").decode().rpartition(" ")
    if host != _host():
        return False
    try:
        return psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

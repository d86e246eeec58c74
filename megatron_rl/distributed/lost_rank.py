"""The names of ranks that end while no watchdog is open: during a run's start (imports, groups, weights) or end.

Each rank writes its process id to the job's key-value store as soon as it has met the others. If a
collective or the store fails, a rank looks up the processes of its own host's ranks there. It names
the ranks whose process is gone. It cannot see other hosts' processes.
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

SETTLE_S = 1.0  # longest wait for a killed process to be gone: it closes its connections before
NAMESPACE = "/proc/self/ns/pid"  # only on Linux
MOST_RANKS = 64  # ranks of one host that are looked up
ADVICE = "see its log and the launcher's log for how it ended (out of memory?); then start the same command again"
UNNAMED = "another rank, which cannot be named"
NO_ANSWER = f"a rank that met the others does not answer, or has ended: {ADVICE}"
GRACE_S = 5.0  # beyond the deadline; torch ends by itself in time, unless a connection is accepted but never answered
NCCL_GRACE_S = 60.0  # beyond the deadline; in it the watchdog finds the cause before NCCL ends the process
_met: list[tuple[dist.Store, int]] = []  # the job's store and this process's rank, once it has met the others


def is_peer_failure(error: BaseException) -> bool:
    """Return whether ``error`` says that a collective failed because of another rank.

    The plain RuntimeErrors of gloo count too.
    """
    return isinstance(error, dist.DistError | PeerError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def note_process(store: dist.Store, rank: int) -> None:
    """Write this process's host and id to the job's store, for the other ranks."""
    _met[:] = [(store, rank)]
    store.set(f"process/{rank}", f"{_host()} {os.getpid()}")


def _host() -> str:
    """Return a name of this host and of its namespace of process ids.

    Containers on one host may have different namespaces.
    """
    numbers = os.readlink(NAMESPACE) if os.path.exists(NAMESPACE) else "one"
    return f"{socket.gethostname()}/{uuid.getnode()}/{numbers}"


def group_timeout(backend: str, deadline_s: float) -> datetime.timedelta:
    """Return the time-out of a process group: ``deadline_s``, plus NCCL_GRACE_S seconds if ``backend`` is "nccl"."""
    return datetime.timedelta(seconds=deadline_s + (NCCL_GRACE_S if backend == "nccl" else 0.0))


def joining(backend: str, deadline_s: float) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that ends this process if the groups within its block are not built in time.

    If a rank ends while the groups are built, gloo alone gives up only after five time-outs
    (torch 2.13).

    deadline_s: seconds for the block; a grace period is added.
    """
    grace_s = group_timeout(backend, GRACE_S).total_seconds()
    return time_limit("joining the other ranks' process groups", deadline_s, grace_s=grace_s, way_out=NO_ANSWER)


@contextlib.contextmanager
def losses_named() -> Iterator[None]:
    """Return a context that turns an error of a collective or the store into a PeerError that names the lost rank."""
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
        f"rank {rank} of {world_size} lost {gone()} while the run was starting or ending{place}: "
        f"{shortened(reason, 200)}; {ADVICE}"
    )


def gone() -> str:
    """Return the names of this host's ranks whose process has ended, as words for a message.

    If no ended rank is found, the words say so. Do not call it while another thread waits for the
    store, which answers one thread at a time.
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
    """Return the job's other ranks on this host, by the launcher's variables; a host's ranks are consecutive.

    own: this process's rank.
    """
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

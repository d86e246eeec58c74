"""Joins the job's ranks at MASTER_ADDR:MASTER_PORT, in bounded time whoever listens there."""

from __future__ import annotations

import datetime
import os
import queue
import threading

import torch.distributed as dist

from megatron_rl.distributed.collectives import open_host_group
from megatron_rl.distributed.installation import has_address
from megatron_rl.errors import PeerError

NCCL_GRACE_S = 60.0  # beyond the deadline, for the watchdog to find the cause before NCCL ends the process
GRACE_S = 5.0  # beyond the deadline, which torch keeps by itself but where a connection is accepted and never answered


def meet(deadline_s: float, url: str = "env://") -> tuple[dist.Store, int, int]:
    """Return the job's store, this process's rank, and the number of ranks. Every rank calls it.

    url: of torch's rendezvous; ``env://``: by the launcher's MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE.

    Raises PeerError where the port is another program's, nobody or a mute one listens, or a rank does not come.
    """
    met: queue.SimpleQueue[tuple | Exception] = queue.SimpleQueue()

    def join() -> None:
        try:
            outcome = next(dist.rendezvous(url, timeout=datetime.timedelta(seconds=deadline_s)))
        except Exception as error:  # noqa: BLE001 (raised by the main thread)
            outcome = error
        met.put(outcome)

    # In a thread of its own: torch 2.13 waits for ever for the first answer of a TCPStore (TCPStore.cpp, validate).
    threading.Thread(target=join, daemon=True, name="rendezvous").start()
    try:
        found = met.get(timeout=deadline_s + GRACE_S)
    except queue.Empty:
        found = TimeoutError("the program that listens there does not answer as a rendezvous")
    if isinstance(found, Exception):
        raise _failure(found, deadline_s) from found
    return found


def group_timeout(backend: str, deadline_s: float) -> datetime.timedelta:
    """Return the time-out of a process group: ``deadline_s``, and NCCL_GRACE_S more for NCCL's."""
    return datetime.timedelta(seconds=deadline_s + (NCCL_GRACE_S if backend == "nccl" else 0.0))


def join_world(backend: str, store: dist.Store, rank: int, world_size: int, deadline_s: float) -> None:
    """Make the default process group of ``world_size`` ranks, and its group for host tensors.

    Raises PeerError where they do not reach one another.

    backend: "nccl" or "gloo".
    """
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=group_timeout(backend, deadline_s),
        )
        open_host_group(deadline_s)
    except RuntimeError as error:  # torch's DistError, and gloo's own
        raise _failure(error, deadline_s) from error


def _failure(error: Exception, deadline_s: float) -> PeerError:
    lines = str(error).splitlines() or [type(error).__name__]
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    rank, world_size, address, port = (os.environ.get(name, "?") for name in names)
    way_out = (
        "another program may hold that port (choose another MASTER_PORT), a firewall may close it, or a rank did not "
        "start"
    )
    if "MASTER_ADDR" in os.environ and not has_address(address):
        way_out = (
            f"{address} has no address on this host: give it a line in /etc/hosts, or set MASTER_ADDR to an address of "
            "rank 0's host (on one host: torchrun --local-addr 127.0.0.1)"
        )
    return PeerError(
        f"rank {rank} of {world_size} could not join the others at {address}:{port} (MASTER_ADDR, MASTER_PORT) within "
        f"{deadline_s:g} s (run.deadline_s): {lines[0][:300]}; {way_out}"
    )

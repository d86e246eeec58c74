"""The meeting of the job's ranks at MASTER_ADDR:MASTER_PORT, within a time limit, whatever program listens there."""

from __future__ import annotations

import datetime
import os
import queue
import socket
import threading
import time

import torch.distributed as dist

from megatron_rl.distributed.collectives import await_all_ranks, open_host_group
from megatron_rl.distributed.lost_rank import ADVICE, GRACE_S, UNNAMED, gone, group_timeout, joining, note_process
from megatron_rl.errors import PeerError


def meet(deadline_s: float, url: str = "env://") -> tuple[dist.Store, int, int]:
    """Return (the job's key-value store, this process's rank, the number of ranks). Every rank calls it.

    deadline_s: seconds for all ranks to come.
    url: the address for torch's rendezvous; ``env://`` takes the launcher's MASTER_ADDR,
        MASTER_PORT, RANK and WORLD_SIZE.

    Raises PeerError if another program holds the port, nothing listens or answers there, or a rank
    does not come.
    """
    met: queue.SimpleQueue[tuple | Exception] = queue.SimpleQueue()

    def join() -> None:
        try:
            if url == "env://":
                _wait_for_listener(deadline_s)
            outcome = next(dist.rendezvous(url, timeout=datetime.timedelta(seconds=deadline_s)))
        except Exception as error:  # noqa: BLE001 (raised by the main thread)
            outcome = error
        met.put(outcome)

    # In another thread: torch 2.13 waits without limit for a TCPStore's first answer (TCPStore.cpp, validate).
    threading.Thread(target=join, daemon=True, name="rendezvous").start()
    try:
        outcome = met.get(timeout=deadline_s + GRACE_S)
    except queue.Empty:
        outcome = TimeoutError("the program that listens there does not answer as a rendezvous")
    if isinstance(outcome, Exception):
        raise _failure(outcome, deadline_s) from outcome
    if url == "env://":
        note_process(outcome[0], outcome[1])
    return outcome


def _wait_for_listener(deadline_s: float) -> None:
    """Return when a program listens at MASTER_PORT; raise TimeoutError after ``deadline_s`` seconds.

    Torch itself would try for twice its time-out, and print stacks meanwhile. Without torchrun rank 0
    is the program that will listen there, so rank 0 returns at once.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not address or not port.isdecimal() or (os.environ.get("RANK") == "0" and not by_launcher):
        return  # torch says what is missing
    until = time.monotonic() + deadline_s
    while True:
        try:
            socket.create_connection((address, int(port)), timeout=deadline_s).close()
            return
        except (OSError, OverflowError) as error:
            if time.monotonic() > until:
                whose = "torchrun" if by_launcher else "rank 0"
                raise TimeoutError(f"nobody listens there ({error}): {whose} did not start, or has ended") from error
        time.sleep(0.1)


def join_world(backend: str, store: dist.Store, rank: int, world_size: int, deadline_s: float) -> None:
    """Make the default process group of ``world_size`` ranks, and the gloo group for host tensors.

    backend: "nccl" or "gloo".
    deadline_s: seconds for the ranks to reach one another.

    Raises PeerError if a rank cannot be reached in time.
    """
    try:
        with joining(backend, deadline_s):
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=group_timeout(backend, deadline_s),
            )
            open_host_group(deadline_s)
            await_all_ranks()
    except RuntimeError as error:  # torch's DistError, or a plain RuntimeError of gloo
        raise _failure(error, deadline_s) from error


def _failure(error: Exception, deadline_s: float) -> PeerError:
    lines = str(error).splitlines() or [type(error).__name__]
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    rank, world_size, address, port = (os.environ.get(name, "?") for name in names)
    way_out = (
        "another program may hold that port (choose another MASTER_PORT), a firewall may close it, or a rank did not "
        "start, or has ended"
    )
    from megatron_rl.distributed.installation import has_address

    if "MASTER_ADDR" in os.environ and not has_address(address):
        way_out = (
            f"{address} has no address on this host: give it a line in /etc/hosts, or set MASTER_ADDR to an address of "
            "rank 0's host (on one host: torchrun --local-addr 127.0.0.1)"
        )
    if (who := gone()) != UNNAMED:
        way_out = f"{who} is lost: {ADVICE}"
    return PeerError(
        f"rank {rank} of {world_size} could not join the others at {address}:{port} (MASTER_ADDR, MASTER_PORT) within "
        f"{deadline_s:g} s (run.deadline_s): {lines[0][:300]}; {way_out}"
    )

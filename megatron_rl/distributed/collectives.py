"""Collectives over the whole world on values in host memory: JSON, small arrays, one rank's error.

The values travel as host tensors by gloo, even if the world's backend is NCCL. NCCL's kernels spin
on the GPU until the last rank has come, and an engine may be decoding there. Also, a rank that
waits in NCCL cannot report where it waits.
"""

from __future__ import annotations

import datetime
import json

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.errors import PeerError

_beside_nccl: list[dist.ProcessGroup] = []  # a gloo group of the world, if the default group is NCCL's
_num_gathers = 0


def open_host_group(deadline_s: float) -> None:
    """Create a gloo group of all ranks if the default process group takes no host tensors. A collective.

    A second call in the same world does nothing.

    deadline_s: the time-out of each collective, in seconds.
    """
    if dist.get_backend() == "gloo" or any(group in dist.distributed_c10d._world.pg_map for group in _beside_nccl):
        return
    _beside_nccl[:] = [dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=deadline_s))]


def host_group() -> dist.ProcessGroup | None:
    """Return the process group of all ranks for host tensors; None if the default group takes them."""
    if dist.get_backend() == "gloo":
        return None
    assert _beside_nccl, "topology.initialize opens the group for host tensors"
    return _beside_nccl[0]


def reduce_on_host(values: torch.Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduce a host tensor over all ranks, in place, and return it. A collective."""
    dist.all_reduce(values, op=op, group=host_group())
    return values


def await_all_ranks() -> None:
    """Return once every rank is here. A collective.

    A rank's part of a new group is done while others still connect to each other. If it ended then,
    theirs would fail with a lost connection, in place of its own error.
    """
    reduce_on_host(torch.zeros(1))


def num_gathers() -> int:
    """Return how often this process has called ``gather_json``.

    The watchdog compares the number at two moments, to tell two waits in ``gather_json`` apart.
    """
    return _num_gathers


def gather_json(value: object) -> list:
    """Return every rank's JSON value, on every rank, in rank order. A collective."""
    global _num_gathers
    _num_gathers += 1
    group, world = host_group(), dist.get_world_size()
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = torch.zeros(world, dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([payload.numel()], dtype=torch.int64), group=group)
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: payload.numel()] = payload
    gathered = torch.zeros(world * longest, dtype=torch.uint8)
    dist.all_gather_into_tensor(gathered, padded, group=group)
    rows = gathered.view(world, longest).numpy()
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes.tolist(), strict=True)]


def broadcast_from_rank0(values: np.ndarray) -> np.ndarray:
    """Return rank 0's float64 array on every rank, bit for bit. A collective.

    Plans depend on the values, and exp and log may round differently on different CPUs.
    """
    return broadcast_on_host(torch.from_numpy(np.array(values, dtype=np.float64))).numpy()


def broadcast_on_host(values: torch.Tensor) -> torch.Tensor:
    """Overwrite a host tensor by rank 0's tensor, in place, and return it. A collective."""
    dist.broadcast(values, src=0, group=host_group())
    return values


def raise_on_all_ranks(error: Exception | None) -> None:
    """Raise an exception on every rank if one rank has an error, so that no rank waits for it later. A collective.

    error: this rank's error, which it raises; None if it has none. Ranks without an error raise
        PeerError with another rank's message.
    """
    messages = gather_json(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise PeerError(f"rank {rank} stopped with {message}")

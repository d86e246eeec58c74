"""Collectives over the whole world: gather JSON values, broadcast rank 0's array, raise an error on all ranks."""

from __future__ import annotations

import json

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.distributed.platform import HOST
from megatron_rl.errors import PeerError


def gather_json(value: object) -> list:
    """Return every rank's JSON value, on every rank, in rank order."""
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(HOST.device)
    world = dist.get_world_size()
    sizes = torch.zeros(world, dtype=torch.int64, device=HOST.device)
    dist.all_gather_into_tensor(sizes, torch.tensor([payload.numel()], dtype=torch.int64, device=HOST.device))
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=HOST.device)
    padded[: payload.numel()] = payload
    gathered = torch.zeros(world * longest, dtype=torch.uint8, device=HOST.device)
    dist.all_gather_into_tensor(gathered, padded)
    rows = gathered.view(world, longest).cpu().numpy()
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes.tolist(), strict=True)]


def broadcast_from_rank0(values: np.ndarray) -> np.ndarray:
    """Return rank 0's float64 array on every rank, bit for bit.

    Plans depend on the values, and exp and log may round differently on another CPU.
    """
    shared = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64)).to(HOST.device)
    dist.broadcast(shared, src=0)
    return shared.cpu().numpy()


def raise_on_all_ranks(error: Exception | None) -> None:
    """Raise one rank's error on every rank, before the others wait for it in a collective.

    error: this rank's, None where all is well. Ranks without an error of their own raise PeerError.
    """
    messages = gather_json(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise PeerError(f"rank {rank} stopped with {message}")

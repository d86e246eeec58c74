"""Collectives over the whole world: JSON values of every rank, rank 0's array on all, an error raised by all ranks
together."""

from __future__ import annotations

import json

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.distributed.platform import HOST
from megatron_rl.errors import PeerError


def gather_json(value: object) -> list:
    """A JSON value from every rank, on every rank, in rank order."""
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
    """Rank 0's float64 array, bitwise, on every rank: exp and log may round differently on another CPU, and plans hang
    on them."""
    shared = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64)).to(HOST.device)
    dist.broadcast(shared, src=0)
    return shared.cpu().numpy()


def raise_on_all_ranks(error: Exception | None) -> None:
    """Raises on every rank what one of them met, before the others wait for it in a collective. ``error``: None where
    all is well."""
    said = gather_json(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, message in enumerate(said):
        if message is not None:
            raise PeerError(f"rank {rank} stopped with {message}")

"""Optimizer steps whose state a checkpoint keeps: layouts, backends and their tensors."""

from __future__ import annotations

import pathlib

import numpy as np
import torch

from megatron_rl.types import StepKind
from tests.equality.rig import open_rig

COMMON = ("optimizer.lr=0.01", "optimizer.weight_decay=0.1", "optimizer.schedule=cosine", "optimizer.warmup_steps=2")
ADVANTAGES = np.array([0.7, -0.9, 0.0, 0.3, -0.2, 0.0, 0.5, -0.4])
PLAIN, SHARDED, BF16 = ("optimizer.distributed=false",), ("optimizer.distributed=true",), ("model.dtype=bfloat16",)


def take_steps(rig, count: int, seed: int = 0) -> None:
    """Take real steps, each on other advantages, then a ghost step."""
    for number in range(count):
        values = np.roll(ADVANTAGES, number + seed)
        plan = rig.plan(values, drops=True)
        rig.accumulate(values, plan)
        rig.backend.optim_step(plan.mini_batches[0].kind)
    rig.backend.optim_step(StepKind.GHOST)


def open_like(topology: tuple[str, ...], family: str):
    # any two of them have the same model
    return open_rig(family, *COMMON, *topology, samples=8, total_steps=20, layers=4)


def tensors_of(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict = {}
    _load_state_dict(found, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {key: x for key, x in found.items() if isinstance(x, torch.Tensor)}  # 0.19.2 keeps its own notes beside them

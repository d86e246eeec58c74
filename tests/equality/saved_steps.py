"""Optimizer steps whose state a checkpoint keeps: layouts, backends, their saving and loading, tensors."""

from __future__ import annotations

import pathlib

import numpy as np
import torch

from megatron_rl.checkpoint import model_state
from megatron_rl.checkpoint.folder import verify
from megatron_rl.types import StepKind
from tests.equality.rig import open_rig
from tests.reference import relative_error

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


def save_and_load(rank, world, root, first, second, family, steps) -> dict[str, object]:
    """Return the first backend's exports at its save and two steps later, and those of a second one that loaded it."""
    folder = pathlib.Path(root)
    with open_like(first, family) as rig:
        rig.backend.keep_reference()
        if steps:
            take_steps(rig, steps)
        pending = model_state.save(rig.backend, folder, 7, {"state.json": "{}"})
        kept, model = model_state.numbers(rig.backend), model_state.identity(rig.backend)
        saved = rig.weights()
        take_steps(rig, 2, seed=3)  # goes on while the thread writes
        later, rate = rig.weights(), rig.backend.optimizer.learning_rate
        path = pending.finish()
    verify(path)
    with open_like(second, family) as rig:
        model_state.load(rig.backend, path, kept, model)
        again = model_state.numbers(rig.backend)
        loaded = rig.weights()
        with rig.backend.reference_weights():
            reference = rig.weights()
        take_steps(rig, 2, seed=3)
        return {
            "numbers": again | {"distributed_optimizer": None} == kept | {"distributed_optimizer": None},
            "loaded": all(torch.equal(loaded[k], x) for k, x in saved.items()),
            "moved": relative_error(reference, saved),
            "next": all(torch.equal(rig.weights()[k], x) for k, x in later.items()),
            "error": relative_error(rig.weights(), later),
            "rate": rig.backend.optimizer.learning_rate == rate,
        }


def tensors_of(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict = {}
    _load_state_dict(found, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {key: x for key, x in found.items() if isinstance(x, torch.Tensor)}  # 0.19.2 keeps its own notes beside them

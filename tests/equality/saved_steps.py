"""Optimizer steps whose state a checkpoint keeps: layouts, backends, their saving and loading, tensors."""

import pathlib

import numpy as np
import torch

from megatron_rl.checkpoint import model_state
from megatron_rl.checkpoint.folder import folder_of, verify
from megatron_rl.types import StepKind
from tests.equality.layouts import BF16, PLAIN, SHARDED, VPP2  # noqa: F401 (other rooms take them from here)
from tests.equality.rig import equal_by_name, open_rig
from tests.reference import file_weights, relative_error

COMMON = ("optimizer.lr=0.01", "optimizer.weight_decay=0.1", "optimizer.schedule=cosine", "optimizer.warmup_steps=2")
ADVANTAGES = np.array([0.7, -0.9, 0.0, 0.3, -0.2, 0.0, 0.5, -0.4])


def take_steps(rig, count: int, seed: int = 0) -> None:
    """Take real steps, each on other advantages, then a ghost step."""
    for number in range(count):
        values = np.roll(ADVANTAGES, number + seed)
        plan = rig.plan(values, drops=True)
        rig.accumulate(values, plan)
        rig.backend.optim_step(plan.mini_batches[0].kind)
    rig.backend.optim_step(StepKind.GHOST)


def open_like(topology: tuple[str, ...], family: str, layers: int = 4):
    # any two of them have the same model
    return open_rig(family, *COMMON, *topology, samples=8, total_steps=20, layers=layers)


def save_and_load(rank, world, root: str, first, second, family: str, steps: int, layers=None) -> dict[str, object]:
    """Save after ``steps``, go on; load in a second backend, go on likewise; return how the two differ."""
    layers = layers or (4 if VPP2 in (*first, *second) else 2)
    with open_like(first, family, layers) as rig:
        rig.backend.keep_reference()
        if steps:
            take_steps(rig, steps)
        pending = model_state.save(rig.backend, folder_of(root), 7, {"state.json": "{}"})
        kept, model = model_state.numbers(rig.backend), model_state.identity(rig.backend)
        saved, exported = rig.trained(), rig.weights()
        take_steps(rig, 2, seed=3)  # goes on while the thread writes
        later, rate = rig.trained(), rig.backend.optimizer.learning_rate
        path = pending.finish()
    verify(path)
    with open_like(second, family, layers) as rig:
        model_state.load(rig.backend, path, kept, model)
        again, loaded, merged = model_state.numbers(rig.backend), rig.trained(), rig.weights()
        with rig.backend.reference_weights():
            reference, passed = rig.weights(), rig.logprobs()
        files = file_weights(rig.model)
        take_steps(rig, 2, seed=3)
        last = rig.trained()
        return {"numbers": again | {"distributed_optimizer": None} == kept | {"distributed_optimizer": None},
                "loaded": equal_by_name(loaded, saved),
                "export": relative_error(merged, exported),
                "reference": relative_error(reference, {k: files[k].to(x.dtype) for k, x in reference.items()}),
                "reference passes": bool(np.isfinite(passed).all()),
                "moved": relative_error(reference, exported),
                "next": equal_by_name(last, later),
                "error": relative_error(last, later),
                "rate": rig.backend.optimizer.learning_rate == rate}


def tensors_of(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict = {}
    _load_state_dict(found, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {key: x for key, x in found.items() if isinstance(x, torch.Tensor)}  # 0.19.2 keeps its own notes beside them

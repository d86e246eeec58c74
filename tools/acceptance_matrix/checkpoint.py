"""Measures a checkpoint: another backend that loads it has the same weights, and goes on to the bit."""

from __future__ import annotations

import pathlib

import torch
from acceptance_matrix.cells import Cell
from acceptance_matrix.facts import num_different, worst_of_ranks

from megatron_rl.checkpoint import model_state
from tests.equality.saved_steps import open_like, take_steps


def forget_moments(rig) -> None:
    """Plant a fault: zero AdamW's first moments."""
    for part in rig.backend.optimizer.megatron.chained_optimizers:
        for state in part.optimizer.state.values():
            state["exp_avg"].zero_()


def all_tensors(rig) -> list[torch.Tensor]:
    return [*rig.weights().values(), *rig.optimizer_state()]


def measure(cell: Cell, fault: str, deadline_s: float, folder: pathlib.Path) -> dict:
    degrees = (f"parallel.{x}" for x in cell.parallel)
    overrides = ("optimizer.distributed=true", "model.layer_spec=torch", f"model.dtype={cell.dtype}", *degrees)
    overrides = (*overrides, f"run.deadline_s={deadline_s}", *cell.overrides)
    with open_like(overrides, cell.family) as rig:
        take_steps(rig, 2)
        pending = model_state.save(rig.backend, folder / "checkpoints", 1, {"state.json": "{}"})
        kept, model = model_state.numbers(rig.backend), model_state.identity(rig.backend)
        saved = all_tensors(rig)
        path = pending.finish()
        take_steps(rig, 2, seed=3)
        later = all_tensors(rig)
    with open_like(overrides, cell.family) as rig:
        model_state.load(rig.backend, path, kept, model)
        if fault == "lose-state":
            forget_moments(rig)
        found = num_different(all_tensors(rig), saved)
        take_steps(rig, 2, seed=3)
        return worst_of_ranks({"checkpoint": found + num_different(all_tensors(rig), later)})

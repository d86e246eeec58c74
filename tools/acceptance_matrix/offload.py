"""Measures offload and restore between steps: nothing changes to the bit, and the device gets its bytes back."""

from __future__ import annotations

import pathlib

import numpy as np
import torch
from acceptance_matrix.cells import Cell
from acceptance_matrix.facts import HOST, num_different, worst_of_ranks

from tests.equality.rig import open_rig, ragged_advantages

COMMON = ("optimizer.lr=0.01", "optimizer.weight_decay=0.1", "optimizer.distributed=true", "model.layer_spec=torch")
ADVANTAGES = ragged_advantages(8)


def moments(rig) -> list[torch.Tensor]:
    parts = rig.backend.optimizer.megatron.chained_optimizers
    return [x for part in parts for state in part.optimizer.state.values() for x in state.values() if x.dim()]


def held_share(state: list[torch.Tensor], freed: int, allocated: int) -> float:
    """Return the share of the freed bytes that the device still holds.

    On CUDA by the allocator's count; on a CPU by the sizes of the storages under AdamW's moments.
    """
    if HOST.is_cuda:
        return 1.0 - (allocated - torch.cuda.memory_allocated()) / freed
    return sum(x.untyped_storage().nbytes() for x in state) / freed


def lose_state(rig) -> None:
    """Plant a fault: zero what the host holds."""
    for block in rig.backend.optimizer._offload.host.blocks:
        block.zero_()


def steps(cell: Cell, overrides: tuple[str, ...], fault: str, *, really: bool) -> tuple[list[torch.Tensor], float]:
    """Take three steps, with offload and restore between them or without.

    Returns the weights and AdamW's tensors after each, and the largest share that was held.
    """
    found, held = [], 0.0
    with open_rig(cell.family, *overrides, samples=8, total_steps=6) as rig:
        for number in range(3):
            rig.step(np.roll(ADVANTAGES, number), drops=True)
            if really:
                state, allocated = moments(rig), torch.cuda.memory_allocated() if HOST.is_cuda else 0
                freed = rig.backend.offload().total
                if fault == "keep-memory":
                    rig.backend.restore()
                held = max(held, held_share(state, freed, allocated))
                if fault == "lose-state":
                    lose_state(rig)
                if fault != "keep-memory":
                    rig.backend.restore()
            found += [*rig.weights().values(), *rig.optimizer_state()]
    return found, held


def measure(cell: Cell, fault: str, deadline_s: float, folder: pathlib.Path) -> dict:
    degrees = (f"parallel.{x}" for x in cell.parallel)
    overrides = (*COMMON, f"model.dtype={cell.dtype}", *degrees, f"run.deadline_s={deadline_s}", *cell.overrides)
    wanted, _ = steps(cell, overrides, "", really=False)
    found, held = steps(cell, overrides, fault, really=True)
    assert not torch.equal(wanted[0], wanted[len(wanted) // 3]), (
        "the steps moved nothing, so that equality says nothing"
    )
    return worst_of_ranks({"offload": num_different(found, wanted), "held": held})

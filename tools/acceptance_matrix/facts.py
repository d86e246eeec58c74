"""Holds the parts that several kinds of cells share: tensors on the host, the worst of all ranks, a planted fault."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # tests/reference.py

from megatron_rl.distributed.collectives import gather_json
from megatron_rl.distributed.platform import HOST


def on_cpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.detach().float().cpu().clone() for name, x in tensors.items()}


def worst_of_ranks(errors: Mapping[str, float], **facts: object) -> dict:
    """Return a cell's result: of each error the largest over ranks (a NaN stays one), and what the cell ran on.

    Collective.
    """
    everyone = np.array(gather_json(list(errors.values())), dtype=float)
    worst = dict(zip(errors, everyone.max(axis=0).tolist(), strict=True))
    return {"errors": worst, "backend": HOST.backend, **facts}


def halve_gradient(backend) -> None:
    """Plant a fault: on the last rank, halve the gradient before its reduction."""
    if backend.topology.rank == backend.topology.world_size - 1:
        for chunk in backend.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.grad_data.mul_(0.5)


def num_different(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Count the tensors that are not equal to the bit; a list that is longer or shorter counts by its excess."""
    same = sum(torch.equal(a, b) for a, b in zip(found, wanted, strict=False))
    return float(max(len(found), len(wanted)) - same)

"""Measures adapters (LoRA) on one layout: gradients, three steps, the export, and the weights that must not move."""

from __future__ import annotations

import pathlib

import numpy as np
import torch
from acceptance_matrix.cells import Cell
from acceptance_matrix.facts import halve_gradient, on_cpu, worst_of_ranks

from tests.adapted import adapters_of, merged
from tests.equality.adapter_rig import ALPHA, CLIP, DECAY, LR, NUM_SAMPLES, PER_MINI_BATCH, RANK, STEPS, open_adapted
from tests.equality.rig import ragged_advantages
from tests.reference import file_weights, reference_gradient, relative_error, tiny_model

ADVANTAGES = ragged_advantages(NUM_SAMPLES)


def gradients(rig, fault: str) -> dict[str, float]:
    wanted, _ = reference_gradient(rig.model, rig.samples, rig.groups, ADVANTAGES.tolist())
    found = []
    for drops in (False, True):
        plan = rig.plan(ADVANTAGES, drops=drops)
        rig.accumulate(ADVANTAGES, plan)
        if fault == "drop-gradient":
            halve_gradient(rig.backend)
        found.append(on_cpu(rig.backend.gradient()))
        rig.backend.zero_grad()
        rig.backend._sums.zero()
    dense, skip = found
    return {"gradient": relative_error(dense, wanted), "skip": relative_error(skip, dense)}


def reference_steps(model: torch.nn.Module, samples: list, groups: list[int]) -> dict[str, torch.Tensor]:
    """Take the three steps on the Hugging Face model by torch's AdamW, and return its adapters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=DECAY)
    for start in range(0, NUM_SAMPLES, PER_MINI_BATCH):
        part = slice(start, min(start + PER_MINI_BATCH, NUM_SAMPLES))
        reference_gradient(model, samples[part], groups[part], ADVANTAGES[part].tolist())
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
    return adapters_of(model)


def steps(rig, family: str) -> dict[str, float]:
    from megatron_rl.model.lora.adapters import adapters_off

    before, old = adapters_of(rig.model), np.concatenate([s.logprobs for s in rig.samples])
    after = reference_steps(rig.model, rig.samples, rig.groups)
    rig.step(ADVANTAGES, drops=True, old=old)
    # one by one: each is lent until the next is asked for
    found = {name: x.float().cpu().clone() for name, x in rig.backend.export_adapters()}
    exported = on_cpu(rig.weights())
    with adapters_off([chunk.module for chunk in rig.backend.chunks]):
        bare = on_cpu(rig.weights())
    base = file_weights(tiny_model(family, layers=rig.model.config.num_hidden_layers)[1])
    whole = merged({**base, **found}, rank=RANK, alpha=ALPHA)
    return {
        "moved": relative_error({k: found[k] - before[k] for k in found}, {k: after[k] - before[k] for k in found}),
        "export": relative_error(exported, {k: whole[k] for k in exported}),
        "frozen": float(sum(not torch.equal(x, base[k]) for k, x in bare.items()) + len(set(exported) ^ set(bare))),
    }


def measure(cell: Cell, fault: str, deadline_s: float, folder: pathlib.Path) -> dict:
    extra = (*cell.overrides, "model.layer_spec=torch", f"run.deadline_s={deadline_s}")
    with open_adapted(cell.family, cell.parallel, extra) as rig:
        errors = gradients(rig, fault)
    with open_adapted(cell.family, cell.parallel, (*STEPS, *extra)) as rig:
        return worst_of_ranks({**errors, **steps(rig, cell.family)})

"""Measures models of Megatron-Bridge's on this job's ranks; the main rank prints a JSON object on its last line.

    python -m torch.distributed.run --nproc_per_node N -m tests.bridge.job FAMILY[,FAMILY] [section.key=value ...]

Per family: the worst error of the equality matrix's quantities against the plain loop over transformers' model
(tests/equality/matrix.py), and whether the weights come out as they went in; for a family with a table of ours, whether
everything equals that table's; on one rank, whether Megatron-Bridge's own export gives the same tensors as ours.
"""

import tests.bridge.engine  # noqa: F401  # isort: skip

import copy
import json
import os
import sys

import numpy as np
import torch

from megatron_rl.weights.families.register import FAMILIES
from tests.equality.matrix import NUM_SAMPLES, Cell, measure, trained_logprobs, worst
from tests.equality.rig import Rig, equal_by_name, open_rig, ragged_advantages
from tests.reference import file_weights, tiny_config

BRIDGE = "model.provider=bridge"


def all_of(rig: Rig) -> dict[str, torch.Tensor]:
    """Return log-probs, the gradient of the skip and the exported weights of a rig, by name."""
    rig.rules(max_tokens=60)
    logprobs = trained_logprobs(rig)
    advantages = ragged_advantages(NUM_SAMPLES)
    gradient = rig.gradient(advantages, rig.plan(advantages, drops=True))
    found = {f"gradient {name}": tensor.clone() for name, tensor in gradient.items()}
    return {"logprobs": logprobs} | found | {f"weight {name}": tensor for name, tensor in rig.weights().items()}


def bridge_export(rig: Rig) -> dict[str, torch.Tensor]:
    """Return the tensors that megatron-bridge itself exports of the rig's chunks."""
    from megatron.bridge import AutoBridge
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = copy.deepcopy(rig.backend.hf_config)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    chunks = [chunk.module for chunk in rig.backend.chunks]
    exported = AutoBridge.from_hf_config(config).export_hf_weights(chunks, cpu=True, show_progress=False)
    return {name: tensor.clone() for name, tensor in exported}


def study(family: str, overrides: list[str]) -> dict[str, object]:
    """Return what is found of one family, on the main rank."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    parallel = tuple(x.removeprefix("parallel.") for x in overrides)
    cell = Cell(name=family, world=world, parallel=parallel, extra=(BRIDGE,), layers=2)
    errors = measure(rank, world, cell, family)
    found: dict[str, object] = {"worst": worst(errors)} if rank == 0 else {}
    with open_rig(family, BRIDGE, *overrides, samples=NUM_SAMPLES) as rig:
        through = all_of(rig)
        weights = {name: tensor for name, tensor in file_weights(rig.model).items() if f"weight {name}" in through}
        if world == 1:
            theirs = bridge_export(rig)
            found["bridge exports the same"] = equal_by_name({k: theirs[k] for k in weights}, weights)
    exported = {name.removeprefix("weight "): x for name, x in through.items() if name.startswith("weight ")}
    found["round trip"] = equal_by_name(exported, weights)
    found["tensors"] = len(exported)
    if tiny_config(family).model_type in FAMILIES:
        with open_rig(family, "model.provider=native", *overrides, samples=NUM_SAMPLES) as rig:
            found["equals ours"] = equal_by_name(through, all_of(rig))
    return found


if __name__ == "__main__":
    np.seterr(all="ignore")
    result = {family: study(family, sys.argv[2:]) for family in sys.argv[1].split(",")}
    if os.environ["RANK"] == "0":
        print(json.dumps(result))

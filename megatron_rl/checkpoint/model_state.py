"""A backend's share of a checkpoint: its tensors and the numbers that belong to them.

Of a model with adapters those alone, and of its frozen weights a checksum: they come from model.hf_path again.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping

import numpy as np
import torch

from megatron_rl.backend.reference_weights import trained
from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.checkpoint.tensors import (
    AdamStates,
    adam_to_save,
    load_adam,
    load_weights,
    weight_entries,
    weights_to_save,
)
from megatron_rl.checkpoint.writer import PendingSave
from megatron_rl.errors import CheckpointError

from megatron.core.dist_checkpointing.mapping import ShardedBase  # isort: skip

REFERENCE = "reference."
# what identity says where every weight is trained; also of a checkpoint from before there were adapters
WITHOUT_LORA = {"lora_rank": 0, "lora_alpha": 0.0, "lora_targets": [], "frozen_weights": None}
OF_THE_RUN = (
    "layer_spec",
    "padded_vocab_size",
    "context_tokens",
    "value_head",
)  # of a ModelShape, may differ between a save and a load


def identity(backend: TrainableModel) -> dict[str, object]:
    """What must be the same for a checkpoint's tensors to mean anything: the model's shape, its adapters' and the
    frozen weights beside them, as JSON-able values. The first call is a collective, where there are adapters."""
    shape = dataclasses.asdict(backend.shape) | {"lora_targets": sorted(backend.shape.lora_targets)}
    shape["frozen_weights"] = backend.frozen_checksum()
    return {name: value for name, value in sorted(shape.items()) if name not in OF_THE_RUN}


def numbers(backend: TrainableModel) -> dict[str, object]:
    """Counters and sums that decide later steps. AdamW's own step count is the scheduler's: both move with every
    applied step."""
    return {
        "step_index": backend.step_index,
        "weight_version": backend.weight_version,
        "optimizer_steps": int(backend.optimizer.scheduler.num_steps),
        "has_reference": _reference(backend) is not None,
        "cost_sums": backend.fit.sums.tolist(),
        "distributed_optimizer": backend.config.optimizer.distributed,
    }


def _reference(backend: TrainableModel) -> list[torch.Tensor] | None:
    return None if backend.reference is None else backend.reference.tensors


def _entries(backend: TrainableModel) -> list[ShardedBase]:
    """Of what is trained."""
    found = weight_entries(backend.chunks)
    return [x for x in found if x.data.requires_grad] if backend.shape.lora_rank else found


def save(
    backend: TrainableModel,
    root: pathlib.Path,
    iteration: int,
    texts: Mapping[str, str],
    own_files: Mapping[str, bytes] | None = None,
) -> PendingSave:
    """Begins a checkpoint of the model, its reference policy and AdamW, as of now; a collective. No gradient may be
    accumulated.

    texts, own_files: what is added to it, see PendingSave.
    """
    backend.schedule.gather_parameters()
    entries = _entries(backend)
    saved = weights_to_save(entries)
    if (reference := _reference(backend)) is not None:
        values = {id(p): kept for p, kept in zip(trained(backend.parameters()), reference, strict=True)}
        saved += weights_to_save([x for x in entries if id(x.data) in values], prefix=REFERENCE, values=values)
    if backend.optimizer.scheduler.num_steps:
        saved += adam_to_save(entries, AdamStates(backend.optimizer.megatron))
    return PendingSave(root, iteration, saved, dict(texts), is_main=backend.topology.is_main, own_files=own_files)


def load(
    backend: TrainableModel, folder: pathlib.Path, kept: Mapping[str, object], model: Mapping[str, object]
) -> None:
    """Puts the backend where ``save`` found another of the same model, of any topology; a collective.

    kept: what ``numbers`` gave. model: the other's ``identity``. Raises CheckpointError where the models differ.
    """
    check_model(backend, folder, model)
    entries = _entries(backend)
    if kept["has_reference"]:
        _put(backend, load_weights(entries, folder, prefix=REFERENCE))
        backend.keep_reference()
    optimizer = backend.optimizer
    if kept["optimizer_steps"]:
        # AdamW makes its tensors in its first step; everything that this one moves is overwritten
        optimizer._ghost_step()
    _put(backend, load_weights(entries, folder))
    optimizer.megatron.reload_model_params()  # float32 masters of half-precision weights, where no AdamW was saved
    if kept["optimizer_steps"]:
        load_adam(entries, AdamStates(optimizer.megatron), folder)
        _set_steps(optimizer.megatron, kept["optimizer_steps"])
    optimizer.scheduler.num_steps = kept["optimizer_steps"]
    optimizer.scheduler.step(0)
    backend.step_index, backend.weight_version = kept["step_index"], kept["weight_version"]
    _restore_fit(backend, np.array(kept["cost_sums"]))
    backend.zero_grad()


def check_model(backend: TrainableModel, folder: pathlib.Path, model: Mapping[str, object]) -> None:
    """Raises CheckpointError where ``model``, a checkpoint's ``identity``, is not the backend's. To be called on every
    rank."""
    own, model = identity(backend), {**WITHOUT_LORA, **model}
    if different := {name: (model.get(name), own[name]) for name in own if model.get(name) != own[name]}:
        said = ", ".join(
            f"{name.replace('lora_', 'lora.')} {theirs} there and {ours} here"
            for name, (theirs, ours) in different.items()
        )
        way = "the model.hf_path and model.dtype" if "frozen_weights" in different else "the model.hf_path"
        if "lora_rank" in different or set(different) <= {"lora_alpha", "lora_targets"}:
            way = "the lora.rank (null for 0), lora.alpha and lora.targets"
        raise CheckpointError(
            f"{folder} is of another model: {said}; give {way} it was trained with, or another run folder"
        )


@torch.no_grad()
def _put(backend: TrainableModel, values: Mapping[int, torch.Tensor]) -> None:
    for chunk in backend.chunks:
        for tensor in (*chunk.module.parameters(), *chunk.module.buffers()):
            if id(tensor) in values:
                tensor.copy_(values[id(tensor)])


def _set_steps(optimizer, steps: int) -> None:
    """AdamW's bias correction: torch keeps a step per parameter, Transformer Engine's and Apex's one per group."""
    for each in optimizer.chained_optimizers:
        if each.is_stub_optimizer:
            continue
        for state in each.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(steps)
        for group in each.optimizer.param_groups:
            if "step" in group:
                group["step"] = group["step"] * 0 + steps


def _restore_fit(backend: TrainableModel, sums: np.ndarray) -> None:
    """What was measured holds for the pipeline that it was measured on."""
    if sums.shape == backend.fit.sums.shape:
        backend.fit.sums = sums
        if backend.config.plan.calibrate:
            backend.rules = dataclasses.replace(backend.rules, cost=backend.fit.model())

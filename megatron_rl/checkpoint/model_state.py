"""The saving and loading of a backend's state in a checkpoint: the model's tensors, the optimizer's, and counters.

With adapters a checkpoint holds the adapters' tensors and a checksum of the frozen weights. The
frozen weights come from model.hf_path again.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_rl.backend.reference_weights import trained
from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.backend.trained_state import set_adam_steps
from megatron_rl.checkpoint.resume import check_identity, identity_of_shape
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

if TYPE_CHECKING:
    from megatron_rl.storage.remote import RemotePath

from megatron.core.dist_checkpointing.mapping import ShardedBase  # isort: skip

REFERENCE = "reference."


def identity(backend: TrainableModel) -> dict[str, object]:
    """Return the properties that a checkpoint's model and this model must share, as JSON-able values.

    They are the model's shape, its adapters' shape and the checksum of the frozen weights. With
    adapters the first call is a collective.
    """
    return {**identity_of_shape(backend.shape), "frozen_weights": backend.frozen_checksum()}


def numbers(backend: TrainableModel) -> dict[str, object]:
    """Return the backend's state that is not a tensor: name → JSON-able value.

    These are the counts of steps and of weight versions, some settings of optimizer and pipeline,
    and ``cost_sums``: sums of measured times, to which the planner fits its cost model.
    """
    return {
        "step_index": backend.step_index,
        "weight_version": backend.weight_version,
        # AdamW's own step count is equal: both increase with every applied step.
        "optimizer_steps": int(backend.optimizer.scheduler.num_steps),
        "has_masters": any(p.dtype != torch.float32 for p in trained(backend.parameters())),
        "has_reference": _reference(backend) is not None,
        "cost_sums": backend.fit.sums.tolist(),
        "stage_layers": list(backend.shape.stage_layers),
        "distributed_optimizer": backend.config.optimizer.distributed,
        "optimizer_algorithm": backend.config.optimizer.algorithm,
    }


def _reference(backend: TrainableModel) -> list[torch.Tensor] | None:
    return None if backend.reference is None else backend.reference.tensors


def _entries(backend: TrainableModel) -> list[ShardedBase]:
    """Return Megatron-Core's sharded tensors of the trained weights: of the adapters if there are any, else of all."""
    entries = weight_entries(backend.chunks)
    return [x for x in entries if x.data.requires_grad] if backend.shape.lora_rank else entries


def save(
    backend: TrainableModel,
    root: pathlib.Path | RemotePath,
    iteration: int,
    texts: Mapping[str, str],
    own_files: Mapping[str, bytes] | None = None,
    *,
    with_adam: bool = True,
    prefixes: Mapping[str, tuple[pathlib.Path, int]] | None = None,
) -> PendingSave:
    """Begin a checkpoint of the model, its reference policy and AdamW in their current state; a collective.

    An accumulated gradient is not saved. ``PendingSave.finish`` of the result completes the
    checkpoint.

    texts, own_files, prefixes: further files of the checkpoint, as PendingSave takes them.
    with_adam: whether AdamW's states are saved, and the float32 masters of bfloat16 weights.
    """
    backend.schedule.gather_parameters()
    entries = _entries(backend)
    saved = weights_to_save(entries)
    if (reference := _reference(backend)) is not None:
        values = {id(p): kept for p, kept in zip(trained(backend.parameters()), reference, strict=True)}
        saved += weights_to_save([x for x in entries if id(x.data) in values], prefix=REFERENCE, values=values)
    if with_adam:
        has_moments = backend.optimizer.scheduler.num_steps > 0
        saved += adam_to_save(entries, AdamStates(backend.optimizer.megatron, moments=has_moments))
    is_main = backend.topology.is_main
    return PendingSave(*(root, iteration, saved, dict(texts)), is_main=is_main, own_files=own_files, prefixes=prefixes)


def load(
    backend: TrainableModel, folder: pathlib.Path, saved: Mapping[str, object], model: Mapping[str, object]
) -> None:
    """Load into the backend the state that ``save`` wrote of the same model, under any topology; a collective.

    Raises CheckpointError if the models differ.

    saved: what the function ``numbers`` returned when the checkpoint was saved.
    model: the saved model's ``identity``.
    """
    check_model(backend, folder, model)
    _check_algorithm(backend, folder, saved)
    entries = _entries(backend)
    # The reference comes first: it is read into the model's parameters and copied from there.
    if saved["has_reference"]:
        _put(backend, load_weights([x for x in entries if x.data.requires_grad], folder, prefix=REFERENCE))
        backend.keep_reference()
    optimizer = backend.optimizer
    if saved["optimizer_steps"]:
        # AdamW makes its tensors in its first step; everything that this step changes is overwritten.
        optimizer.ghost_step()
    _put(backend, load_weights(entries, folder))
    optimizer.megatron.reload_model_params()  # float32 masters of bfloat16 weights, if none were saved
    # checkpoints of earlier releases lack has_masters
    if saved["optimizer_steps"] or saved.get("has_masters", False):
        load_adam(entries, AdamStates(optimizer.megatron, moments=saved["optimizer_steps"] > 0), folder)
    set_adam_steps(backend, saved["optimizer_steps"])
    optimizer.scheduler.step(0)
    backend.step_index, backend.weight_version = saved["step_index"], saved["weight_version"]
    if saved.get("stage_layers", []) == list(backend.shape.stage_layers):  # checkpoints of earlier releases lack it
        _restore_fit(backend, np.array(saved["cost_sums"]))
    backend.zero_grad()


def check_model(backend: TrainableModel, folder: pathlib.Path, model: Mapping[str, object]) -> None:
    """Raise CheckpointError if ``model``, the ``identity`` in a checkpoint, differs from the backend's.

    A collective.
    """
    check_identity(identity(backend), folder, model)


def _check_algorithm(backend: TrainableModel, folder: pathlib.Path, saved: Mapping[str, object]) -> None:
    """Raise CheckpointError if the checkpoint holds the states of another algorithm than the run's."""
    there, here = saved.get("optimizer_algorithm", "adam"), backend.config.optimizer.algorithm  # earlier: AdamW alone
    if saved["optimizer_steps"] and there != here:
        raise CheckpointError(
            f"{folder} holds the optimizer's states of optimizer.algorithm={there}, and this run's is {here}; set "
            f"optimizer.algorithm={there}, or start from the weights alone (model.hf_path, an export of the checkpoint)"
        )


@torch.no_grad()
def _put(backend: TrainableModel, values: Mapping[int, torch.Tensor]) -> None:
    for chunk in backend.chunks:
        for tensor in (*chunk.module.parameters(), *chunk.module.buffers()):
            if id(tensor) in values:
                tensor.copy_(values[id(tensor)])


def _restore_fit(backend: TrainableModel, sums: np.ndarray) -> None:
    """Restore the sums of measured times to which the planner's cost model is fitted.

    Under ``plan.calibrate`` the planner uses the cost model fitted to these sums from now on. If the
    number of pipeline stages has changed, nothing is restored.
    """
    if sums.shape == backend.fit.sums.shape:
        backend.fit.sums = sums
        if backend.config.plan.calibrate:
            backend.rules = dataclasses.replace(backend.rules, cost=backend.fit.model())

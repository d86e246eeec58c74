"""Saving and loading of a model's weights, with or without AdamW's state, to the bit.

A folder holds one checkpoint in the trainer's format (``iter_0000000``), which any layout of ranks
can read. The field ``serve`` of its state.json describes its adapters. ``save`` and ``load`` are
collectives.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil

from megatron_rl.backend import trained_state
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.checkpoint import model_state
from megatron_rl.checkpoint.folder import STATE, name_of, verify
from megatron_rl.checkpoint.state_file import read_model_state
from megatron_rl.checkpoint.writer import raise_everywhere
from megatron_rl.errors import CheckpointError
from megatron_rl.serve.values import AdapterSpec, RequestError

ITERATION = 0


def save(backend: MegatronBackend, folder: pathlib.Path, spec: AdapterSpec | None, *, with_adam: bool) -> None:
    """Write the backend's model to ``folder``, and wait until the checkpoint is complete. An existing one is replaced.

    spec: the model's adapters; None if every weight is trained.
    with_adam: whether AdamW's state is written too.
    """
    state = {
        "model": model_state.identity(backend),
        "backend": model_state.numbers(backend) | ({} if with_adam else {"has_masters": False}),
        "serve": None if spec is None else dataclasses.asdict(spec),
        "with_adam": with_adam,
    }
    texts = {STATE: json.dumps(state) + "\n"}
    model_state.save(backend, folder, ITERATION, texts, with_adam=with_adam).finish()


def load(backend: MegatronBackend, folder: pathlib.Path, *, with_adam: bool) -> AdapterSpec | None:
    """Load a checkpoint into the backend; return the model's adapters, None if every weight is trained.

    with_adam: whether AdamW's state is loaded. If not, its moments are zero afterwards.

    Raises CheckpointError if the checkpoint is damaged or of another model. Raises RequestError if
    AdamW's state is requested and missing.
    """
    # Verify the files, a share on each rank, and read the state.
    path = folder / name_of(ITERATION)
    state, error = {}, None
    try:
        verify(path, share=(backend.topology.rank, backend.topology.world_size))
        state = read_model_state(path)
    except CheckpointError as raised:
        error = raised
    raise_everywhere(error)
    if with_adam and not state["with_adam"]:
        raise RequestError(
            "these are weights for a sampler, which have no optimizer state; load them without the optimizer, or load "
            "what save_state wrote"
        )
    # Load the weights, and set AdamW's state and the adapters' scale.
    numbers = dict(state["backend"])
    if not with_adam:
        numbers["optimizer_steps"] = 0
    step_index = backend.step_index
    model_state.load(backend, path, numbers, state["model"])
    backend.step_index = step_index  # the server's own step index, which all ranks compare, goes on
    if not numbers["optimizer_steps"]:
        trained_state.reset_adam(backend)
    spec = None if state["serve"] is None else AdapterSpec(**state["serve"])
    trained_state.set_scale(backend, None if spec is None else backend.shape.lora_alpha / spec.rank)
    return spec


def link_copy(source: pathlib.Path, target: pathlib.Path) -> None:
    """Replace the folder ``target`` by a copy of a checkpoint's folder. Not a collective.

    The copy uses hard links, which take no room, if the file system has them. A later save to the
    source makes new files, so the copy does not change.
    """

    def put(file: str, copy: str) -> str:
        try:
            os.link(file, copy)
        except OSError:
            shutil.copy2(file, copy)
        return copy

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=put)

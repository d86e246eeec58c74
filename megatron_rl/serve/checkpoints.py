"""Saves a model's weights, with or without AdamW, and loads them: the trainer's own checkpoints, to the bit.

A folder holds one checkpoint of the trainer's format (``iter_0000000``), which any layout of ranks
reads; its state.json says in ``serve`` which adapters it has. ``save`` and ``load`` are
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
    """Write the model in the backend, and wait until it is whole; a folder of this name is replaced."""
    state = {
        "model": model_state.identity(backend),
        "backend": model_state.numbers(backend),
        "serve": None if spec is None else dataclasses.asdict(spec),
        "with_adam": with_adam,
    }
    texts = {STATE: json.dumps(state) + "\n"}
    model_state.save(backend, folder, ITERATION, texts, with_adam=with_adam).finish()


def load(backend: MegatronBackend, folder: pathlib.Path, *, with_adam: bool) -> AdapterSpec | None:
    """Read a checkpoint into the backend, and return its adapters; without AdamW its moments are zero.

    Raises CheckpointError for another model's or a damaged one, RequestError where AdamW is asked
    for and not there.
    """
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
            "these are weights for a sampler, which have no optimizer state; load them without it, or load what "
            "save_state wrote"
        )
    numbers = dict(state["backend"])
    if not with_adam:
        numbers["optimizer_steps"] = 0
    step_index = backend.step_index
    model_state.load(backend, path, numbers, state["model"])
    backend.step_index = step_index  # of the server, which all ranks compare
    if not numbers["optimizer_steps"]:
        trained_state.reset_adam(backend)
    spec = None if state["serve"] is None else AdapterSpec(**state["serve"])
    trained_state.set_scale(backend, None if spec is None else backend.shape.lora_alpha / spec.rank)
    return spec


def link_copy(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copy a checkpoint's folder over another: by hard links, which take no room, or whole where there are none.

    What is saved over the source later makes new files, so that the copy stays as it is. Not a
    collective.
    """

    def put(file: str, copy: str) -> str:
        try:
            os.link(file, copy)
        except OSError:
            shutil.copy2(file, copy)
        return copy

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=put)

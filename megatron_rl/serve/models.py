"""The models in training. One at a time is in the backend, the others wait in the host memory of every rank.

An operation brings its whole model into the backend: weights, AdamW's moments and step count, the
gradient accumulated so far, and the adapters' scale. So models do not influence each other
(``backend/trained_state.py``). Every rank does the same in the same order. With adapters all models
share the frozen weights, and a model takes four times the memory of its adapters (float32).
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_rl.backend import trained_state
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.backend.trained_state import TrainedState
from megatron_rl.model.lora.adapters import start_adapters
from megatron_rl.serve import checkpoints
from megatron_rl.serve.values import AdapterSpec, RequestError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """Holds a copy of trained parameters in host memory.

    tensors: this rank's trained parameters, in the backend's order.
    scale: alpha / rank of the adapters; None without adapters.
    masters: AdamW's float32 copies of bfloat16 weights on this rank; () if none were kept.
    """

    tensors: Sequence[torch.Tensor]
    scale: float | None
    masters: Sequence[torch.Tensor] = ()


class Models:
    """Holds every model's state. All ranks must call the methods in the same order; some are collectives and say so."""

    def __init__(self, backend: MegatronBackend) -> None:
        """Copy the backend's current weights as the base model. A collective."""
        self.backend = backend
        trained_state.begin_adam(backend)
        self.base = Weights(
            tensors=trained_state.take_weights(backend),
            scale=trained_state.scale_of(backend),
            masters=trained_state.take_masters(backend),
        )
        self._waiting: dict[str, TrainedState | None] = {}  # a model's name → its state; None: it is in the backend
        self._active: str | None = None

    @property
    def names(self) -> list[str]:
        """Return the names of the models in memory, the least recently used first."""
        return list(self._waiting)

    def create(self, name: str, spec: AdapterSpec | None) -> None:
        """Begin a model with fresh adapters or, without adapters, with the base model's weights. AdamW's state is zero.

        spec: the adapters; None if every weight is trained.
        """
        self._put_away()
        backend = self.backend
        if spec is None:
            trained_state.put_weights(backend, self.base.tensors, self.base.scale)
            trained_state.put_masters(backend, self.base.masters)
        else:
            chunks = [chunk.module for chunk in backend.chunks]
            start_adapters(
                chunks, backend.shape, backend.topology, seed=spec.seed, rank=spec.rank, targets=spec.targets
            )
            backend.optimizer.megatron.reload_model_params()  # the float32 masters of bfloat16 adapters
        backend.zero_grad()
        trained_state.reset_adam(backend)
        backend.weight_version = 0
        self._waiting[name], self._active = None, name

    def load(self, name: str, folder: pathlib.Path, *, with_adam: bool) -> AdapterSpec | None:
        """Load a checkpoint as the model ``name``, new or in place of its state; return its adapters. A collective.

        with_adam: whether AdamW's state is loaded too.

        If it raises, an existing model of this name is unchanged.
        """
        self._put_away()
        spec = checkpoints.load(self.backend, folder, with_adam=with_adam)
        self._waiting.pop(name, None)
        self._waiting[name], self._active = None, name
        return spec

    def save(self, name: str, folder: pathlib.Path, spec: AdapterSpec | None, *, with_adam: bool) -> None:
        """Write a model to a folder, with AdamW's state if ``with_adam``. A collective."""
        checkpoints.save(self.activate(name), folder, spec, with_adam=with_adam)

    def read(self, folder: pathlib.Path) -> Weights:
        """Return the weights in a checkpoint; no model is created or changed. A collective."""
        self._put_away()
        checkpoints.load(self.backend, folder, with_adam=False)
        return Weights(tensors=trained_state.take_weights(self.backend), scale=trained_state.scale_of(self.backend))

    def activate(self, name: str) -> MegatronBackend:
        """Bring a model into the backend, unless it is there already; return the backend."""
        if name not in self._waiting:
            raise RequestError(f"model {name!r} is not held here", status=404)
        if self._active != name:
            self._put_away()
            trained_state.put(self.backend, self._waiting[name])
            self._active = name
        del self._waiting[name]  # moves it to the end, as the most recently used
        self._waiting[name] = None
        return self.backend

    def _put_away(self) -> None:
        if self._active is not None:
            self._waiting[self._active] = trained_state.take(self.backend)
            self._active = None

    def drop(self, name: str) -> None:
        """Forget a model. Do nothing if it is not in memory."""
        self._waiting.pop(name, None)
        if self._active == name:
            self.backend.zero_grad()
            self._active = None

    def discard_gradient(self, name: str) -> None:
        """Discard the gradient accumulated since the model's last optimizer step."""
        if name in self._waiting:
            self.activate(name).zero_grad()

    def snapshot(self, name: str) -> Weights:
        """Return a copy of a model's weights."""
        backend = self.activate(name)
        return Weights(tensors=trained_state.take_weights(backend), scale=trained_state.scale_of(backend))

    @contextlib.contextmanager
    def reading(self, weights: Weights | None) -> Iterator[MegatronBackend]:
        """Yield the backend with ``weights`` in it; restore the backend's own weights after the block.

        weights: the weights to use; None uses the base model's.
        """
        backend, wanted = self.backend, weights or self.base
        own, scale = trained_state.take_weights(backend), trained_state.scale_of(backend)
        base_of_adapters = weights is None and backend.shape.lora_rank
        trained_state.put_weights(
            backend,
            [torch.zeros_like(x) for x in own] if base_of_adapters else wanted.tensors,
            scale if base_of_adapters else wanted.scale,
        )
        try:
            yield backend
        finally:
            trained_state.put_weights(backend, own, scale)

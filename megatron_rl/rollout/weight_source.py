"""Sources of the weights that the rollout manager sends to engines: the whole policy, or its adapters alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Protocol

import torch

from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.distributed import collectives
from megatron_rl.rollout.engines.engine import Engine

Tensors = Iterator[tuple[str, torch.Tensor]]


class WeightSource(Protocol):
    """Gives a trainer's weights."""

    @property
    def version(self) -> int: ...

    def tensors(self, engine: Engine) -> Tensors:
        """Return the tensors to send to the engine, under Hugging Face names. A collective, as is the iteration."""
        ...


class PolicyWeights:
    """Gives every weight, with the adapters merged into it. ``bucket_bytes``: bytes that are gathered at once."""

    def __init__(self, backend: MegatronBackend, bucket_bytes: int) -> None:
        self._backend, self._bucket_bytes = backend, bucket_bytes

    @property
    def version(self) -> int:
        return self._backend.weight_version

    def tensors(self, engine: Engine) -> Tensors:
        return self._backend.export(bucket_bytes=self._bucket_bytes, merges=True)


class AdapterWeights(PolicyWeights):
    """Gives the adapters alone. If any engine lacks the frozen weights, these come first."""

    def tensors(self, engine: Engine) -> Tensors:
        adapters = self._backend.export_adapters(bucket_bytes=self._bucket_bytes)
        if any(collectives.gather_json(engine.lacks_weights)):
            return itertools.chain(self._backend.export(bucket_bytes=self._bucket_bytes, merges=False), adapters)
        return adapters

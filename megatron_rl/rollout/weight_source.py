"""Sources of the weights that are sent to engines: the whole policy, or its LoRA adapters alone."""

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
    """Gives the trainer's weights and their version."""

    @property
    def version(self) -> int: ...

    def tensors(self, engine: Engine) -> Tensors:
        """Return (name, tensor) pairs to send to the engine. The call and the iteration are collectives.

        The names are Hugging Face names for weights, and PEFT's names for adapters.
        """
        ...


class PolicyWeights:
    """Gives every weight of the policy, with the adapters merged into it.

    bucket_bytes: the maximum of bytes that ranks gather at once.
    """

    def __init__(self, backend: MegatronBackend, bucket_bytes: int) -> None:
        self._backend, self._bucket_bytes = backend, bucket_bytes

    @property
    def version(self) -> int:
        return self._backend.weight_version

    def tensors(self, engine: Engine) -> Tensors:
        return self._backend.export(bucket_bytes=self._bucket_bytes, merges=True)


class AdapterWeights(PolicyWeights):
    """Gives the adapters alone. If any rank's engine lacks the frozen base weights, gives these first."""

    def tensors(self, engine: Engine) -> Tensors:
        adapters = self._backend.export_adapters(bucket_bytes=self._bucket_bytes)
        if any(collectives.gather_json(engine.lacks_weights)):
            return itertools.chain(self._backend.export(bucket_bytes=self._bucket_bytes, merges=False), adapters)
        return adapters

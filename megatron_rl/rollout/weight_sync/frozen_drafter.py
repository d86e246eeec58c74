"""The weights of a drafter in a vLLM worker: loaded from its files, written by no sync, and signed in each receipt.

A draft model, an EAGLE head or MTP heads draft with weights of their own. What else they use, such as the
policy's embedding, they share with the policy, and it moves with each sync. This module runs in the
engine's process (vLLM 0.32.0).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import torch
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.utils import get_draft_load_config
from vllm.v1.spec_decode import draft_model

from megatron_rl.weights.bucket_digest import NUM_PARTS, part_digests


def load_from_files() -> None:
    """Let vLLM load a draft model as its ``draft_load_config`` says.

    vLLM (0.32.0, v1/spec_decode/draft_model.py, ``_get_model``) passes it on for heads, but not for
    a draft model. This would get the policy's format instead: ``dummy``, random weights.
    """
    draft_model.get_model = _get_draft_model


def _get_draft_model(*, vllm_config, **given) -> torch.nn.Module:
    model = get_model(**{"vllm_config": vllm_config, "load_config": get_draft_load_config(vllm_config)} | given)
    model.is_from_files = True
    return model


class FrozenDrafter:
    """Signs the weights that are a drafter's alone, and remembers the signature of its start.

    policy: the model that samples.
    drafter: the model that drafts.
    name: the drafter's folder.
    """

    def __init__(self, policy: torch.nn.Module, drafter: torch.nn.Module, name: str) -> None:
        self._policy, self._drafter, self._name = policy, drafter, name
        self._loaded = self.checksum()

    def receipt(self) -> dict[str, str]:
        """Return the drafter's folder, the checksum of its weights at the start, and of its weights now."""
        return {"model": self._name, "loaded": self._loaded, "held": self.checksum()}

    @torch.no_grad()
    def checksum(self) -> str:
        """Return a checksum of the drafter's own weights, 16 hexadecimal digits."""
        total = hashlib.blake2b(digest_size=8)
        for name, tensor in self._tensors():
            content = tensor.detach().contiguous()
            content = content.clone() if content.storage_offset() else content
            digests = part_digests(content.view(-1).view(torch.uint8), range(NUM_PARTS)).tolist()
            total.update(json.dumps([name, str(tensor.dtype), list(tensor.shape), digests]).encode())
        return total.hexdigest()

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for each weight that the policy does not have too.

        On a CPU vLLM keeps a layer's weight only packed, in a form that cannot be read. Then its
        product with a fixed vector stands for it, up to rounding.
        """
        shared = {id(x) for x in (*self._policy.parameters(), *self._policy.modules())}
        for name, parameter in self._drafter.named_parameters():
            if id(parameter) not in shared and parameter.numel():
                yield name, parameter
        for name, layer in self._drafter.named_modules():
            weight = layer._parameters.get("weight")
            if weight is not None and not weight.numel() and "cpu_linear" in vars(layer) and id(layer) not in shared:
                yield f"{name}.packed", _product(layer, weight)


def _product(layer: torch.nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """Return the product of a layer's packed weight with a vector of numbers between 0.5 and 1.5."""
    width = vars(layer).get("input_size_per_partition", layer.input_size)  # a layer that no worker cuts has no part
    places = torch.arange(width, dtype=torch.float64)
    vector = (0.5 + (places * 0.6180339887498949) % 1.0).to(weight.dtype)
    return layer.cpu_linear(vector[None], weight, None)

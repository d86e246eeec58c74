"""Checks and repairs of the model in a vLLM worker while vLLM's layerwise reload replaces its weights.

This module runs in the engine's process, with the receiver (vLLM 0.32.0,
model_executor/model_loader/reload).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, get_layerwise_info
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel


def plain(name: str) -> str:
    """Return a parameter's name without the part ``base_layer``, which vLLM adds for layers with adapters."""
    return name.replace(".base_layer.", ".")


def count_values(model: torch.nn.Module, wanted: Collection[str]) -> int:
    """Return the number of elements of the wanted parameters; padding rows of a vocabulary are not counted.

    wanted: the parameters' names, as ``plain`` returns them.
    """
    padding = {
        id(layer.weight): (layer.num_embeddings_padded - layer.org_vocab_size) * layer.embedding_dim
        for layer in model.modules()
        if isinstance(layer, VocabParallelEmbedding)
    }
    parameters = [parameter for name, parameter in model.named_parameters() if plain(name) in wanted]
    return sum(get_tensor_load_numel(parameter) - padding.get(id(parameter), 0) for parameter in parameters)


def drop_half_loaded(model: torch.nn.Module, config: ModelConfig) -> None:
    """Forget the tensors of a sync that broke off, and restore every layer's parameters from before the sync.

    vLLM's ``finalize_layerwise_reload`` alone would first load the tensors that it still holds, and
    would raise each time for a tensor of a wrong shape. The next sync overwrites all parameters.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.loaded_weights.clear()
        info.load_numel = 0
    finalize_layerwise_reload(model, config)


def partial_layers(model: torch.nn.Module) -> list[str]:
    """Return the layers that got only some of their weights, as texts "NAME (512 of 768 values)".

    The values are the elements of the weights. For example, a layer may get q without k and v. A
    layer was processed as soon as its last weight arrived, and is then not returned. Embeddings are
    left out, since the padding rows of a vocabulary never arrive.
    """
    partial = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        size = sum(get_tensor_load_numel(parameter) for parameter in layer.parameters(recurse=False))
        if info.can_load() and 0 < info.load_numel < size and not isinstance(layer, VocabParallelEmbedding):
            partial.append(f"{name.removesuffix('.base_layer')} ({info.load_numel:,} of {size:,} values)")
    return partial


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Remove the kernels of mixture-of-experts layers, so that vLLM packs their new weights for a CPU.

    vLLM (0.32.0) packs the experts' weights when it first builds a layer's kernel, but not when
    weights are reloaded. The old kernel would then read plain weights as packed weights. Without a
    kernel vLLM builds a new one, and packs the weights.
    """
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel = None


def process_tied(model: torch.nn.Module) -> None:
    """Process the new weights of an output layer that is tied to the embedding, as vLLM does for other layers.

    vLLM (0.32.0) skips such a layer, which receives no weights itself. Its matrix product on a CPU
    would then still use the packed weights of the previous sync, with log-probs off by 4 nats.
    """
    seen: set[int] = set()
    for module in model.modules():
        tied = [p for p in module.parameters(recurse=False) if id(p) in seen]
        if tied:
            module.quant_method.process_weights_after_loading(module)
        seen |= {id(p) for p in module.parameters(recurse=False)}


def keep_waiting(model: torch.nn.Module, packed: torch.Tensor, device: torch.device) -> None:
    """Copy to ``device`` the tensors of a bucket that vLLM holds until the rest of their layer arrives.

    They are views of ``packed``, the bucket's bytes, which the sender will overwrite. The tensors
    of a mixture-of-experts layer may wait long, since for vLLM all experts are one layer.
    """
    memory = packed.untyped_storage().data_ptr()
    for layer in model.modules():
        for _, arguments in get_layerwise_info(layer).loaded_weights:
            for name, value in arguments.arguments.items():
                if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == memory:
                    arguments.arguments[name] = value.to(device, copy=True)

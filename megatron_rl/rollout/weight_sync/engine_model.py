"""The model in a vLLM worker while its weights are replaced, by vLLM's layerwise reload: what it lacks, and its faults.

It lives in the engine's process, with the receiver (vLLM 0.32.0,
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
    """Return a parameter's name without what vLLM adds to that of a layer that takes adapters."""
    return name.replace(".base_layer.", ".")


def count_values(model: torch.nn.Module, wanted: Collection[str]) -> int:
    """Return the number of values of the wanted parameters, without a vocabulary's padding."""
    padding = {
        id(layer.weight): (layer.num_embeddings_padded - layer.org_vocab_size) * layer.embedding_dim
        for layer in model.modules()
        if isinstance(layer, VocabParallelEmbedding)
    }
    parameters = [parameter for name, parameter in model.named_parameters() if plain(name) in wanted]
    return sum(get_tensor_load_numel(parameter) - padding.get(id(parameter), 0) for parameter in parameters)


def drop_half_loaded(model: torch.nn.Module, config: ModelConfig) -> None:
    """Forget the tensors of a sync that broke off, and give every layer its earlier tensors back.

    The next sync overwrites all of them. Finalizing with the forgotten ones would load weights that
    were refused, with a wrong shape for example, and raise for ever.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.loaded_weights.clear()
        info.load_numel = 0
    finalize_layerwise_reload(model, config)


def partial_layers(model: torch.nn.Module) -> list[str]:
    """Return the layers of several weights (q, k and v; gate and up; experts) that some weights did not reach.

    A complete layer is processed at once and no longer open; the rows that pad a vocabulary never
    arrive.
    """
    partial = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        size = sum(get_tensor_load_numel(parameter) for parameter in layer.parameters(recurse=False))
        if info.can_load() and 0 < info.load_numel < size and not isinstance(layer, VocabParallelEmbedding):
            partial.append(f"{name.removesuffix('.base_layer')} ({info.load_numel:,} of {size:,} values)")
    return partial


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Remove the kernels of a mixture's experts, so that vLLM packs the new weights for a CPU.

    vLLM (0.32.0) packs experts when it first builds their kernel, and not again when weights are
    reloaded: the kernel would read plain weights as packed ones. Without a kernel it builds one
    anew, and packs.
    """
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel = None


def process_tied(model: torch.nn.Module) -> None:
    """Process an output layer that is tied to the embedding, as vLLM (0.32.0) does not.

    It receives nothing itself; on a CPU its matrix product would go on with the packed weights of
    the previous sync, 4 nats off.
    """
    seen: set[int] = set()
    for module in model.modules():
        tied = [p for p in module.parameters(recurse=False) if id(p) in seen]
        if tied:
            module.quant_method.process_weights_after_loading(module)
        seen |= {id(p) for p in module.parameters(recurse=False)}


def keep_waiting(model: torch.nn.Module, packed: torch.Tensor, device: torch.device) -> None:
    """Copy those of a bucket's tensors that vLLM keeps for layers which are not complete yet.

    packed: the bucket, whose memory the sender uses again. A mixture's experts are one layer: with
        buckets that hold them all, a worker copies their slices too.
    """
    memory = packed.untyped_storage().data_ptr()
    for layer in model.modules():
        for _, arguments in get_layerwise_info(layer).loaded_weights:
            for name, value in arguments.arguments.items():
                if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == memory:
                    arguments.arguments[name] = value.to(device, copy=True)

"""What vLLM's layerwise reload (0.32.0) lacks: tensors that outlive their bucket, packed experts, tied layers."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info


def keep_waiting(model: torch.nn.Module, packed: torch.Tensor, device: torch.device) -> None:
    """Copy those of a bucket's tensors that vLLM keeps for layers which are not complete yet.

    packed: the bucket, whose memory the sender uses again. A mixture's experts are one layer: with buckets that hold
        them all, a worker copies their slices too.
    """
    memory = packed.untyped_storage().data_ptr()
    for layer in model.modules():
        for _, arguments in get_layerwise_info(layer).loaded_weights:
            for name, value in arguments.arguments.items():
                if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == memory:
                    arguments.arguments[name] = value.to(device, copy=True)


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Remove the kernels of a mixture's experts, so that vLLM packs the new weights for a CPU.

    vLLM (0.32.0) packs experts when it first builds their kernel, and not again when weights are reloaded: the
    kernel would read plain weights as packed ones. Without a kernel it builds one anew, and packs.
    """
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel = None


def process_tied(model: torch.nn.Module) -> None:
    """Process an output layer that is tied to the embedding, as vLLM (0.32.0) does not.

    It receives nothing itself; on a CPU its matrix product would go on with the packed weights of the previous
    sync, 4 nats off.
    """
    seen: set[int] = set()
    for module in model.modules():
        tied = [p for p in module.parameters(recurse=False) if id(p) in seen]
        if tied:
            module.quant_method.process_weights_after_loading(module)
        seen |= {id(p) for p in module.parameters(recurse=False)}

"""Floating-point operations of a model's forward and backward pass."""

from __future__ import annotations

import math

from megatron_rl.weights.mapping import hf_size, pair_entries, target_entries
from megatron_rl.weights.model_shape import ModelShape


def adapter_parameters(shape: ModelShape) -> int:
    """Return the number of adapter parameters that a token passes in all layers; 0 where every weight is trained.

    Of a mixture's routed experts they are those of ``experts_per_token``.
    """
    passed = 0
    for layer in range(shape.num_layers):
        for weight in target_entries(shape, layer, shape.num_experts or 1):  # of the experts, one
            times = 1 if weight.expert is None else shape.experts_per_token
            passed += times * sum(math.prod(hf_size(shape, entry.hf[0])) for entry in pair_entries(weight))
    return passed


def flops_per_token(shape: ModelShape, mean_context: float) -> float:
    """Return forward and backward FLOPs of one token: 6 per parameter it passes, 4 per frozen one, and attention's.

    mean_context: tokens, the mean number that a token attends to in a layer that sees all before it.
    """
    linear = shape.num_layers * shape.layer_parameters + shape.vocab_size * shape.hidden_size
    if shape.lora_rank:
        linear = 4.0 / 6.0 * linear + adapter_parameters(shape)
    return 6.0 * linear + 12.0 * shape.score_width * shape.attended(mean_context)

"""A model's cost per token in FLOPs, and the division of its layers over pipeline stages by these costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.model.settings import ModelSettings
from megatron_rl.planning.pipeline_layout import stage_layers
from megatron_rl.weights.mapping import hf_size, pair_entries, target_entries
from megatron_rl.weights.model_shape import ModelShape


def layout_of(shape: ModelShape, settings: ModelSettings, hf_config: Any) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage, in the order of the layers.

    Each chunk of a rank (``parallel.virtual_pipeline``) counts as a stage. The layers' costs are
    those of a sample of half the largest length (``max_prompt_tokens`` + ``max_response_tokens``).
    The LM head's cost counts a response's tokens only.

    Raises ConfigError if planning/pipeline_layout.py ``stage_layers`` does, for example for more
    stages than layers. Under LoRA it also raises ConfigError for a stage without layers, which
    would have nothing to train.
    """
    prompt, response = settings.max_prompt_tokens, settings.max_response_tokens
    # logits are computed twice, in forward and in backward; under full recompute so are the layers
    twice = 1.0 if full_recompute(settings.megatron.transformer) else 4 / 3
    counts = stage_layers(
        settings.parallel,
        [layer_cost(shape, (prompt + response) / 2, layer) for layer in range(shape.num_layers)],
        round(shape.head_cost(response, prompt + response, times=twice)),
        model=hf_config.name_or_path or hf_config.model_type,
    )
    if settings.lora.rank is not None and 0 in counts and not shape.value_head:
        raise ConfigError(
            f"parallel.pipeline_layout leaves stage {counts.index(0)} without a layer, and "
            f"lora.rank={settings.lora.rank} trains adapters of layers alone: that stage would have nothing to train; "
            "give it one"
        )
    return counts


def full_recompute(transformer: Mapping[str, Any]) -> bool:
    """Return whether backward recomputes the forward pass of every layer.

    transformer: the user's ``megatron.transformer`` fields.
    """
    return transformer.get("recompute_granularity") == "full"


def layer_cost(shape: ModelShape, tokens: float, layer: int) -> int:
    """Return the cost of the model's layer ``layer`` per token, in units of 6 FLOPs, rounded to an integer.

    The unit is the forward and backward of one weight, as in simulator/machine.py. The cost is the
    number of weights that a token is multiplied with, plus the cost of a token's attention in a
    sample of ``tokens`` tokens. A gated delta net has its rule's cost instead, which is the same for
    samples of any length (``DeltaNetShape.rule_cost``).
    """
    if shape.has_delta_net(layer):
        return round(shape.token_cost(layer))
    seen = shape.windows[layer] if shape.windows else 0
    if shape.chunked is not None and layer in shape.chunked.chunked_layers:
        seen = shape.chunked.chunk_tokens / 2
    return round(shape.passed_parameters(layer) + shape.score_width * min(tokens, 2 * seen or tokens))


def adapter_parameters(shape: ModelShape) -> int:
    """Return the number of adapter weights that one token is multiplied with, added up over all layers.

    It is 0 without LoRA. In a mixture of experts a token passes the adapters of
    ``experts_per_token`` routed experts.
    """
    passed = 0
    for layer in range(shape.num_layers):
        for weight in target_entries(shape, layer, shape.num_experts or 1):  # it lists one expert of each mixture
            times = 1 if weight.expert is None else shape.experts_per_token
            passed += times * sum(math.prod(hf_size(shape, entry.hf[0])) for entry in pair_entries(weight))
    return passed


def flops_per_token(shape: ModelShape, mean_context: float) -> float:
    """Return the FLOPs of one token, forward and backward.

    Each trained weight costs 6 FLOPs and each frozen weight 4. The FLOPs of the attention scores
    are added, and those of the rule of gated delta nets.

    mean_context: the mean number of tokens that a token attends to in a layer with full attention.
    """
    linear = sum(map(shape.passed_parameters, range(shape.num_layers))) + shape.vocab_size * shape.hidden_size
    if shape.lora_rank:
        linear = 4.0 / 6.0 * linear + adapter_parameters(shape)
    if shape.delta is not None:
        linear += len(shape.delta.layers) * shape.delta.rule_cost
    return 6.0 * linear + 12.0 * shape.score_width * shape.attended(mean_context)

"""Divides a model's layers over pipeline stages by what each costs in this run: matrices, attention scores, LM head."""

from __future__ import annotations

from typing import Any

from megatron_rl.config import Config
from megatron_rl.errors import ConfigError
from megatron_rl.planning.pipeline_layout import stage_layers
from megatron_rl.weights.model_shape import ModelShape


def layout_of(shape: ModelShape, config: Config, hf_config: Any) -> tuple[int, ...]:
    """Return the number of layers of each stage, chunks counted one by one, in the order of the layers.

    Raises ConfigError for more stages than layers, and as planning/pipeline_layout.py ``stage_layers`` does.
    """
    found = stage_layers(
        config.parallel,
        [layer_cost(shape, config, layer) for layer in range(shape.num_layers)],
        head_cost(shape, config),
        model=hf_config.name_or_path or hf_config.model_type,
    )
    if config.lora.rank is not None and 0 in found and not shape.value_head:
        raise ConfigError(
            f"parallel.pipeline_layout leaves stage {found.index(0)} without a layer, and lora.rank={config.lora.rank} "
            "trains adapters of layers alone: that stage would have nothing to train; give it one"
        )
    return found


def layer_cost(shape: ModelShape, config: Config, layer: int) -> int:
    """Return a layer's cost per token: the weights that it passes, and the attention scores of a sample of mean length.

    A sample is taken to be half as long as the limits allow. The unit is 6 FLOPs, forward and backward, as
    simulator/machine.py counts them.
    """
    length = (config.data.max_prompt_tokens + config.rollout.max_response_tokens) / 2
    seen = shape.windows[layer] if shape.windows else 0
    if shape.chunked is not None and layer in shape.chunked.chunked_layers:
        seen = shape.chunked.chunk_tokens / 2
    return round(shape.passed_parameters(layer) + shape.score_width * min(length, 2 * seen or length))


def head_cost(shape: ModelShape, config: Config) -> int:
    """Return the last matrix's cost per token, in the unit of ``layer_cost``: it runs at loss positions alone.

    Its logits are made twice. Under full recompute the layers are too, so that it weighs less beside them.
    """
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    twice = 1.0 if config.megatron.transformer.get("recompute_granularity") == "full" else 4 / 3
    return round(shape.head_parameters * twice * response / (prompt + response))

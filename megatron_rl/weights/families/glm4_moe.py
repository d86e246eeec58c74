"""GLM-4.5, 4.5-Air and 4.6 (``glm4_moe``): rotary angles on a part of each head, and DeepSeek-V3's kind of mixture."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.entry import Entry
from megatron_rl.weights.families.dense_layer import attention_entries, attention_sizes, dense_layer
from megatron_rl.weights.families.family import Family
from megatron_rl.weights.families.layer_fields import refuse_other_layers
from megatron_rl.weights.families.sigmoid_router import (
    EXPERTS,
    refuse_other_routers,
    router_entries,
    sigmoid_features,
    sigmoid_router,
    sigmoid_sizes,
)
from megatron_rl.weights.model_shape import ModelShape


def refuse(hf_config: Any) -> None:
    """Raise ConfigError unless Megatron-Core has the config's router, the activation is silu and attention is full."""
    refuse_other_layers(hf_config)
    refuse_other_routers(hf_config)


def features(hf_config: Any) -> dict[str, Any]:
    """Return keyword arguments of ModelShape for biases, norms of q and k, and the mixture's sizes.

    Biases are on q, k and v, never on the output projection.
    """
    return dict(
        qkv_bias=hf_config.attention_bias,
        qk_norm=hf_config.use_qk_norm,
        num_extra_layers=hf_config.num_mtp_layers,
        **sigmoid_features(hf_config),
    )


def layer(shape: ModelShape) -> tuple[Entry, ...]:
    return (*attention_entries(shape), *router_entries())


def sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    return attention_sizes(shape) | sigmoid_sizes(shape)


GLM4_MOE = Family(
    model_type="glm4_moe",
    turns_partly=True,
    ffn_field="moe_intermediate_size",
    refuse=refuse,
    features=features,
    layer=layer,
    first_layers=dense_layer,
    sizes=sizes,
    layer_fields=sigmoid_router,
    expert_adapters=True,
    experts=EXPERTS,
)

"""Llama 2 and 3, and models of their shape such as SmolLM2 (``llama``)."""

from __future__ import annotations

from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.weights.families.dense_layer import dense_fields, dense_layer, dense_sizes
from megatron_rl.weights.families.family import Family
from megatron_rl.weights.families.refusals import refuse_other_layers


def refuse(hf_config: Any) -> None:
    """Raise ConfigError for biases or another kind of layer."""
    refuse_other_layers(hf_config)
    if hf_config.attention_bias or hf_config.mlp_bias:
        raise ConfigError(
            "a llama model with attention_bias or mlp_bias is not supported: its output projections carry biases too"
        )


def features(hf_config: Any) -> dict[str, Any]:
    """Return no feature beside the common ones."""
    return {}


LLAMA = Family(
    model_type="llama",
    refuse=refuse,
    features=features,
    layer=dense_layer,
    sizes=dense_sizes,
    layer_fields=dense_fields,
)

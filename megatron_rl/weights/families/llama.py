"""Llama 2 and 3, and models of their shape such as SmolLM2 (``llama``)."""

from __future__ import annotations

from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.weights.families.family import Family
from megatron_rl.weights.families.layer_fields import refuse_other_layers


def refuse(hf_config: Any) -> None:
    """Raise ConfigError for biases, an activation other than silu, or a layer without full attention."""
    refuse_other_layers(hf_config)
    if hf_config.attention_bias or hf_config.mlp_bias:
        raise ConfigError(
            "a llama model with attention_bias or mlp_bias is not supported: its output projections carry biases too"
        )


LLAMA = Family(
    model_type="llama",
    bitwise=True,
    refuse=refuse,
)

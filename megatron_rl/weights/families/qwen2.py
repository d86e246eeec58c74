"""Qwen2 and Qwen2.5 (``qwen2``): a Llama layer with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.families.family import Family
from megatron_rl.weights.families.layer_fields import refuse_other_layers, windows_of


def refuse(hf_config: Any) -> None:
    """Raise ConfigError if the MLP's activation is not silu.

    ``features`` refuses layers with neither full nor sliding attention.
    """
    refuse_other_layers(hf_config, windows=True)


def features(hf_config: Any) -> dict[str, Any]:
    """Return keyword arguments of ModelShape for biases on q, k and v, and for the layers' sliding windows."""
    return dict(qkv_bias=True, windows=windows_of(hf_config))


QWEN2 = Family(
    model_type="qwen2",
    bitwise=True,
    refuse=refuse,
    features=features,
)

"""Qwen2 and Qwen2.5 (``qwen2``): a Llama layer with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.families.family import Family
from megatron_rl.weights.families.refusals import refuse_other_layers, refuse_sliding_window


def refuse(hf_config: Any) -> None:
    """Raise ConfigError for a sliding window or another kind of layer."""
    refuse_other_layers(hf_config)
    refuse_sliding_window(hf_config)


def features(hf_config: Any) -> dict[str, Any]:
    """Return biases on q, k and v."""
    return dict(qkv_bias=True)


QWEN2 = Family(
    model_type="qwen2",
    bitwise=True,
    refuse=refuse,
    features=features,
)

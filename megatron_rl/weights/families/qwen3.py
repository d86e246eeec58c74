"""Qwen3, dense (``qwen3``): a Llama layer with norms over each head of q and k."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.families.family import Family
from megatron_rl.weights.families.refusals import refuse_attention_bias, refuse_other_layers, refuse_sliding_window


def refuse(hf_config: Any) -> None:
    """Raise ConfigError for biases of attention, a sliding window or another kind of layer."""
    refuse_other_layers(hf_config)
    refuse_attention_bias(hf_config)
    refuse_sliding_window(hf_config)


def features(hf_config: Any) -> dict[str, Any]:
    """Return norms of q and k."""
    return dict(qk_norm=True)


QWEN3 = Family(
    model_type="qwen3",
    bitwise=True,
    refuse=refuse,
    features=features,
)

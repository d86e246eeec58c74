"""Qwen3, dense (``qwen3``): a Llama layer with norms over each head of q and k."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.families.family import Family
from megatron_rl.weights.families.layer_fields import refuse_attention_bias, refuse_other_layers, windows_of


def refuse(hf_config: Any) -> None:
    """Raise ConfigError if attention has biases, or the MLP's activation is not silu.

    ``features`` refuses layers with neither full nor sliding attention.
    """
    refuse_other_layers(hf_config, windows=True)
    refuse_attention_bias(hf_config)


def features(hf_config: Any) -> dict[str, Any]:
    """Return keyword arguments of ModelShape for norms of q and k, and for the layers' sliding windows."""
    return dict(qk_norm=True, windows=windows_of(hf_config))


QWEN3 = Family(
    model_type="qwen3",
    bitwise=True,
    refuse=refuse,
    features=features,
)

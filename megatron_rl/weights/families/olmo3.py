"""OLMo 3 (``olmo3``): OLMo 2's layer; three of four layers have a sliding window; rotary angles by layer kind."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.families.family import Family
from megatron_rl.weights.families.layer_fields import refuse_attention_bias, refuse_other_layers, windows_of
from megatron_rl.weights.families.olmo2 import post_norm_layer, post_norm_sizes


def refuse(hf_config: Any) -> None:
    """Raise ConfigError if attention has biases, or the MLP's activation is not silu.

    ``features`` refuses layers with neither full nor sliding attention.
    """
    refuse_other_layers(hf_config, windows=True)
    refuse_attention_bias(hf_config)


def features(hf_config: Any) -> dict[str, Any]:
    """Return keyword arguments of ModelShape for norms after attention and MLP, and for the layers' sliding windows."""
    return dict(post_norms=True, windows=windows_of(hf_config))


OLMO3 = Family(
    model_type="olmo3",
    turns_by_kind=True,
    refuse=refuse,
    features=features,
    layer=post_norm_layer,
    sizes=post_norm_sizes,
)

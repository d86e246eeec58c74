"""Gemma 3's text models (``gemma3_text``): norms before and after attention and MLP, windows, angles by layer kind."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.weights.entry import Entry, Layout
from megatron_rl.weights.families.dense_layer import dense_layer
from megatron_rl.weights.families.family import Family
from megatron_rl.weights.families.layer_fields import refuse_attention_bias, windows_of
from megatron_rl.weights.model_shape import ModelShape

# Hugging Face's names of the norms after attention and MLP, by the names of megatron_rl/model/post_norm.py.
_BEHIND = {
    "self_attention.post_norm.weight": "post_attention_layernorm.weight",
    "mlp.post_norm.weight": "post_feedforward_layernorm.weight",
}


def refuse(hf_config: Any) -> None:
    """Raise ConfigError for soft-capping, bidirectional attention, biases, or an activation other than gelu (tanh)."""
    refuse_attention_bias(hf_config)
    if hf_config.hidden_activation != "gelu_pytorch_tanh":
        raise ConfigError(
            f"hidden_activation={hf_config.hidden_activation!r} of gemma3_text is not supported; only "
            "gelu_pytorch_tanh is"
        )
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (cap := hf_config.to_dict()[name]) is not None:
            raise ConfigError(f"{name}={cap} of gemma3_text is not supported: nothing here caps; only null is")
    if hf_config.use_bidirectional_attention:
        raise ConfigError("use_bidirectional_attention=true of gemma3_text is not supported; only causal attention is")


def features(hf_config: Any) -> dict[str, Any]:
    """Return keyword arguments of ModelShape for the norms, the embedding's factor, gelu and the sliding windows."""
    return dict(qk_norm=True, sandwich_norms=True, scaled_embedding=True, gelu=True, windows=windows_of(hf_config))


def layer(shape: ModelShape) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of a Gemma 3 layer.

    They are a Llama layer's parameters and two more norms, after attention and after the MLP. The
    norm before the MLP has another Hugging Face name than in Llama.
    """
    before = (
        dataclasses.replace(entry, hf=("pre_feedforward_layernorm.weight",))
        if entry.hf == ("post_attention_layernorm.weight",)
        else entry
        for entry in dense_layer(shape)
    )
    behind = (Entry(megatron=name, hf=(hf,), layout=Layout.REPLICATED) for name, hf in _BEHIND.items())
    return (*before, *behind)


GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    turns_by_kind=True,
    reads=("sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"),
    refuse=refuse,
    features=features,
    layer=layer,
)

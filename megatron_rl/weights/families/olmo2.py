"""OLMo 2 (``olmo2``): norms after attention and MLP, none before them, and norms over the whole of q and of k."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.entry import Entry, Layout
from megatron_rl.weights.families.dense_layer import dense_layer, dense_sizes
from megatron_rl.weights.families.family import Family
from megatron_rl.weights.families.layer_fields import refuse_attention_bias, refuse_other_layers
from megatron_rl.weights.model_shape import ModelShape

# megatron_rl/model/post_norm.py's names, with Hugging Face's.
_NORMS = {
    "self_attention.post_norm.weight": ("post_attention_layernorm.weight", Layout.REPLICATED),
    "mlp.post_norm.weight": ("post_feedforward_layernorm.weight", Layout.REPLICATED),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", Layout.SPLIT),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", Layout.SPLIT),
}


def refuse(hf_config: Any) -> None:
    """Raise ConfigError if attention has biases, the activation is not silu, or a layer lacks full attention."""
    refuse_other_layers(hf_config)
    refuse_attention_bias(hf_config)


def features(hf_config: Any) -> dict[str, Any]:
    """Return keyword arguments of ModelShape for norms after attention and MLP."""
    return dict(post_norms=True)


def post_norm_layer(shape: ModelShape) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of an OLMo 2 layer.

    They are a Llama layer's matrices, and the norms after attention and MLP and over q and k.
    """
    matrices = (entry for entry in dense_layer(shape) if entry.layout is not Layout.REPLICATED)
    norms = (Entry(megatron=name, hf=(hf,), layout=layout) for name, (hf, layout) in _NORMS.items())
    return (*matrices, *norms)


def post_norm_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return {Hugging Face name within the layer: shape} of a layer's tensors, except norms over the hidden state."""
    return dense_sizes(shape) | {
        "self_attn.q_norm.weight": (shape.num_heads * shape.head_dim,),
        "self_attn.k_norm.weight": (shape.num_kv_heads * shape.head_dim,),
    }


OLMO2 = Family(
    model_type="olmo2",
    refuse=refuse,
    features=features,
    layer=post_norm_layer,
    sizes=post_norm_sizes,
)

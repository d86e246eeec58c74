"""DeepSeek-V3 and R1, Moonlight and Kimi-K2 (``deepseek_v3``): multi-latent attention, and GLM-4.5's kind of mixture.

In each head, q and k have a rotated part (with rotary embedding) and a part that is not rotated.
All heads share k's rotated part, a projection of the hidden state. The rest of k, and v, are
projected from a latent, a short normed vector of the token. All of q is projected from another
latent (DeepSeek-V2, arXiv 2405.04434, section 2.1). In a model without a latent of q, as Moonlight,
q is projected from the hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.errors import ConfigError, quoted
from megatron_rl.weights.entry import Entry, Layout
from megatron_rl.weights.families.dense_layer import dense_layer
from megatron_rl.weights.families.family import Family
from megatron_rl.weights.families.layer_fields import refuse_attention_bias, refuse_other_layers
from megatron_rl.weights.families.sigmoid_router import (
    EXPERTS,
    refuse_other_routers,
    router_entries,
    sigmoid_features,
    sigmoid_router,
    sigmoid_sizes,
)
from megatron_rl.weights.model_shape import ModelShape

# Values that a config.json may have beside the fields of transformers' class, which computes only these.
_ONLY = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
# Fields that vLLM reads (0.32 ``deepseek_v2.py``) and transformers does not write.
_ROUTER = ("scoring_func", "topk_method")


def refuse(hf_config: Any) -> None:
    """Raise ConfigError if a config of deepseek_v3 has a feature that the model built here lacks.

    Refused are biases of attention, activations other than silu, layers without full attention,
    grouped keys and values, other routers, and other rotary embeddings.
    """
    refuse_other_layers(hf_config)
    refuse_attention_bias(hf_config)
    refuse_other_routers(hf_config)
    fields = hf_config.to_dict()
    for name, only in _ONLY.items():
        if fields.get(name, only) != only:
            raise ConfigError(f"{name}={quoted(fields[name])} of deepseek_v3 is not supported; only {only!r} is")
    if hf_config.num_key_value_heads != hf_config.num_attention_heads:
        raise ConfigError(
            f"num_key_value_heads={hf_config.num_key_value_heads} of deepseek_v3 is not supported: multi-latent "
            f"attention makes keys and values for each of num_attention_heads={hf_config.num_attention_heads}"
        )
    if not hf_config.rope_interleave:
        raise ConfigError(
            "rope_interleave=false of deepseek_v3 is not supported: Megatron-Core's multi-latent attention turns "
            "neighbours in pairs (rope_interleave=true)"
        )
    if (kind := hf_config.rope_parameters["rope_type"]) not in ("default", "yarn"):
        raise ConfigError(f"rope_type={kind!r} of deepseek_v3 is not supported; default and yarn are")


def refuse_served(fields: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError for a config.json that lacks the fields by which vLLM builds a sigmoid router with a bias.

    fields: the fields of config.json.
    path: the name of config.json, for the message.
    """
    for name in _ROUTER:
        if fields.get(name) != _ONLY[name]:
            raise ConfigError(
                f"{path} lacks {name}={_ONLY[name]!r}, without which rollout.engine=vllm builds another router than "
                "the trainer's; transformers leaves the field out when it saves: set it there"
            )


def features(hf_config: Any) -> dict[str, Any]:
    """Return keyword arguments of ModelShape for the widths within multi-latent attention and the mixture's sizes."""
    return dict(
        head_dim=hf_config.qk_nope_head_dim + hf_config.qk_rope_head_dim,
        q_lora_rank=hf_config.q_lora_rank or 0,
        kv_lora_rank=hf_config.kv_lora_rank,
        rope_head_dim=hf_config.qk_rope_head_dim,
        value_head_dim=hf_config.v_head_dim,
        num_extra_layers=hf_config.num_mtp_layers,
        **sigmoid_features(hf_config),
    )


def latent_entries(shape: ModelShape) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of multi-latent attention.

    The norm before attention is included. The projections to the latents are whole on every tensor
    rank. The projections from the latents to heads are split by heads.
    """
    # Transformer Engine's spec fuses the latents' norms into the linears after them. It does not fuse the norm of the
    # hidden state, which two linears read (0.16.1 gpt_layer_specs.py).
    fused = shape.layer_spec == "transformer_engine"

    def entry(megatron: str, hf: str, layout: Layout) -> Entry:
        return Entry(megatron=megatron, hf=(f"{hf}.weight",), layout=layout)

    def latent(part: str, down: str) -> list[Entry]:
        norm = f"linear_{part}_up_proj.layer_norm_weight" if fused else f"{part}_layernorm.weight"
        return [
            entry(f"self_attention.linear_{part}_down_proj.weight", f"self_attn.{down}", Layout.REPLICATED),
            entry(f"self_attention.{norm}", f"self_attn.{part}_a_layernorm", Layout.REPLICATED),
            entry(f"self_attention.linear_{part}_up_proj.weight", f"self_attn.{part}_b_proj", Layout.GATE_UP),
        ]

    whole = [entry("self_attention.linear_q_proj.weight", "self_attn.q_proj", Layout.GATE_UP)]
    return (
        entry("input_layernorm.weight", "input_layernorm", Layout.REPLICATED),
        *(latent("q", "q_a_proj") if shape.q_lora_rank else whole),
        *latent("kv", "kv_a_proj_with_mqa"),
        entry("self_attention.linear_proj.weight", "self_attn.o_proj", Layout.COLUMNS),
    )


def latent_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return {Hugging Face name within the layer: shape} of multi-latent attention's tensors."""
    hidden, heads, rank = shape.hidden_size, shape.num_heads, shape.kv_lora_rank
    q, kv = heads * shape.head_dim, heads * (shape.head_dim - shape.rope_head_dim + shape.value_head_dim)
    return {
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.q_a_proj.weight": (shape.q_lora_rank, hidden),
        "self_attn.q_a_layernorm.weight": (shape.q_lora_rank,),
        "self_attn.q_b_proj.weight": (q, shape.q_lora_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (rank + shape.rope_head_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (rank,),
        "self_attn.kv_b_proj.weight": (kv, rank),
        "self_attn.o_proj.weight": (hidden, heads * shape.value_head_dim),
    }


def layer(shape: ModelShape) -> tuple[Entry, ...]:
    return (*latent_entries(shape), *router_entries())


def first_layer(shape: ModelShape) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of a layer with one MLP, not a mixture."""
    mlp = (x for x in dense_layer(shape) if not x.megatron.startswith(("self_attention.", "input_layernorm.")))
    return (*latent_entries(shape), *mlp)


def sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    return latent_sizes(shape) | sigmoid_sizes(shape)


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    ffn_field="moe_intermediate_size",
    reads=tuple(_ONLY),
    refuse=refuse,
    refuse_served=refuse_served,
    features=features,
    layer=layer,
    first_layers=first_layer,
    sizes=sizes,
    layer_fields=sigmoid_router,
    experts=EXPERTS,
)

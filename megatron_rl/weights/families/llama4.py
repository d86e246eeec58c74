"""Llama 4's text models (``llama4_text``): attention in chunks or without positions, one expert by a sigmoid score.

An expert's score is a sigmoid. It multiplies the expert's input, not its output. A shared expert
runs beside the routed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.errors import ConfigError, quoted
from megatron_rl.weights.entry import Entry, Layout
from megatron_rl.weights.families.dense_layer import attention_entries, attention_sizes
from megatron_rl.weights.families.family import ExpertNames, Family
from megatron_rl.weights.families.layer_fields import refuse_attention_bias
from megatron_rl.weights.model_shape import ChunkedAttentionShape, ModelShape

EXPERTS = ExpertNames(
    block="feed_forward",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    stacked=("gate_up_proj", "down_proj"),
    transposed=True,
)
ROPES = ("default", "linear", "llama3")
KINDS = ("chunked_attention", "full_attention")


def refuse(hf_config: Any) -> None:
    """Raise ConfigError if a config of llama4_text has a feature that the model built here lacks.

    Refused are biases, several experts per token, noise on the router, and unknown activations,
    rotary types or kinds of layers. A model without a chunk size or without a mixture is refused.
    So is one whose ``layer_types`` or ``no_rope_layers`` has fewer entries than the model has layers.
    """
    refuse_attention_bias(hf_config)
    if hf_config.hidden_act != "silu":
        raise ConfigError(f"hidden_act={hf_config.hidden_act!r} of llama4_text is not supported; only silu is")
    if hf_config.num_experts_per_tok != 1:
        raise ConfigError(
            f"num_experts_per_tok={hf_config.num_experts_per_tok} of llama4_text is not supported: Megatron-Core "
            "multiplies an expert's input by its score for one expert per token alone (moe_apply_probs_on_input), and "
            "divides the scores of several by their sum"
        )
    if hf_config.router_jitter_noise:
        raise ConfigError(
            f"router_jitter_noise={hf_config.router_jitter_noise} of llama4_text is not supported: it draws noise per "
            "batch; set it to 0.0"
        )
    if not hf_config.attention_chunk_size:
        raise ConfigError(
            f"attention_chunk_size={hf_config.attention_chunk_size} of llama4_text is not supported: transformers "
            "refuses it too; give max_position_embeddings for attention without chunks"
        )
    if (kind := hf_config.rope_parameters["rope_type"]) not in ROPES:
        raise ConfigError(f"rope_type={kind!r} of llama4_text is not supported; {', '.join(ROPES)} are")
    layers = hf_config.num_hidden_layers
    for name in ("layer_types", "no_rope_layers"):
        if len(listed := hf_config.to_dict()[name]) < layers:
            raise ConfigError(f"{name} of llama4_text has {len(listed)} entries, below num_hidden_layers={layers}")
    if set(kinds := hf_config.layer_types) - set(KINDS):
        raise ConfigError(f"layer_types={quoted(kinds)} of llama4_text is not supported; {' and '.join(KINDS)} are")
    if not set(mixtures := hf_config.moe_layers) & set(range(layers)):
        raise ConfigError(f"moe_layers={quoted(mixtures)} of llama4_text leaves no mixture, which is not supported")


def features(hf_config: Any) -> dict[str, Any]:
    """Return keyword arguments of ModelShape for the mixture and for attention in chunks.

    They list the layers without a mixture, the chunked layers, and the layers with a rotary
    embedding.
    """
    layers = range(hf_config.num_hidden_layers)
    dense = tuple(layer for layer in layers if layer not in hf_config.moe_layers)
    return dict(
        chunked=ChunkedAttentionShape(
            chunk_tokens=hf_config.attention_chunk_size,
            chunked_layers=tuple(i for i in layers if hf_config.layer_types[i] == "chunked_attention"),
            turned_layers=tuple(i for i in layers if hf_config.no_rope_layers[i]),
            l2_norm=hf_config.use_qk_norm,
            scale=float(hf_config.attn_scale) if hf_config.attn_temperature_tuning else 0.0,
            scale_tokens=float(hf_config.floor_scale),
        ),
        num_experts=hf_config.num_local_experts,
        experts_per_token=hf_config.num_experts_per_tok,
        num_dense_layers=len(dense),
        dense_layers=dense,
        dense_ffn_hidden_size=hf_config.intermediate_size_mlp if dense else 0,
        shared_ffn_hidden_size=hf_config.intermediate_size,
    )


def _mlp(megatron: str, hf: str) -> tuple[Entry, ...]:
    gate_up = tuple(f"feed_forward.{hf}{part}_proj.weight" for part in ("gate", "up"))
    return (
        Entry(megatron=f"{megatron}.linear_fc1.weight", hf=gate_up, layout=Layout.GATE_UP),
        Entry(
            megatron=f"{megatron}.linear_fc2.weight", hf=(f"feed_forward.{hf}down_proj.weight",), layout=Layout.COLUMNS
        ),
    )


def _before_mlp(name: str) -> Entry:
    return Entry(megatron=name, hf=("post_attention_layernorm.weight",), layout=Layout.REPLICATED)


def mixture_layer(shape: ModelShape) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of a layer with a mixture.

    The routed experts' parameters are not included.
    """
    router = Entry(megatron="mlp.router.weight", hf=("feed_forward.router.weight",), layout=Layout.REPLICATED)
    norm = _before_mlp("pre_mlp_layernorm.weight")
    return (*attention_entries(shape), norm, router, *_mlp("mlp.shared_experts", "shared_expert."))


def one_mlp_layer(shape: ModelShape) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of a layer with one MLP, not a mixture."""
    fused = shape.layer_spec == "transformer_engine"
    norm = _before_mlp("mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight")
    return (*attention_entries(shape), norm, *_mlp("mlp", ""))


def sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return {Hugging Face name within the layer: shape} of the tensors of layers with and without a mixture.

    Norms over the hidden state are left out. An expert's names begin with ``expert.``.
    """
    hidden = shape.hidden_size
    widths = {
        "feed_forward.": shape.dense_ffn_hidden_size,
        "feed_forward.shared_expert.": shape.shared_ffn_hidden_size,
        "expert.": shape.ffn_hidden_size,
    }
    shapes = attention_sizes(shape) | {"feed_forward.router.weight": (shape.num_experts, hidden)}
    for within, width in widths.items():
        shapes |= {f"{within}{part}_proj.weight": (width, hidden) for part in ("gate", "up")}
        shapes[f"{within}down_proj.weight"] = (hidden, width)
    return shapes


def layer_fields(shape: ModelShape) -> dict[str, Any]:
    """Return keyword arguments of Megatron-Core's TransformerConfig for the mixture of experts.

    They also switch Megatron-Core's rotary embedding off; model/attention/chunked.py applies its own.
    """
    by_layer = [int(shape.has_mixture(layer)) for layer in range(shape.num_layers)]
    return dict(
        no_rope_freq=[1] * shape.num_layers,
        num_moe_experts=shape.num_experts,
        moe_ffn_hidden_size=shape.ffn_hidden_size,
        moe_layer_freq=by_layer if shape.num_dense_layers else 1,
        moe_shared_expert_intermediate_size=shape.shared_ffn_hidden_size,
        moe_router_topk=shape.experts_per_token,
        moe_router_score_function="sigmoid",
        moe_router_dtype="fp32",
        moe_apply_probs_on_input=True,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_z_loss_coeff=None,
        moe_grouped_gemm=shape.layer_spec == "transformer_engine",
    )


def engine_arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of vLLM's engine that turn attn_temperature_tuning on or off, as config.json says.

    attn_temperature_tuning scales the query by position. By default vLLM (0.32.0
    ``models/llama4.py``) turns it on only if max_model_len is above 32,768.
    """
    return {"override_generation_config": {"attn_temperature_tuning": fields.get("attn_temperature_tuning", True)}}


def counts_pads(hf_config: Any) -> bool:
    """Return whether the query is scaled by position, so that pads before a prompt change the model's result.

    For this scale transformers counts pads as positions, whatever mask and positions it is given
    (5.19 ``Llama4TextAttention.forward``).
    """
    return bool(hf_config.attn_temperature_tuning)


LLAMA4 = Family(
    model_type="llama4_text",
    refuse=refuse,
    engine_arguments=engine_arguments,
    counts_pads=counts_pads,
    features=features,
    layer=mixture_layer,
    first_layers=one_mlp_layer,
    sizes=sizes,
    layer_fields=layer_fields,
    experts=EXPERTS,
)

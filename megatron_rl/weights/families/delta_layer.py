"""A layer with a gated delta net (Qwen3-Next, 3.5): the mapping of its parameters to Hugging Face, and their shapes.

The projection's rows lie by group: a head of q and k, with the heads of v that it serves, the output
gates of these heads, and each head's β and a. Tensor ranks hold whole groups. Files hold the same
numbers in other orders: ``qwen3_next`` by group in two tensors, ``qwen3_5`` by part in four. The
convolution's weights lie by group here, and by part in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_rl.errors import ConfigError, quoted
from megatron_rl.weights.entry import Entry, Layout
from megatron_rl.weights.families.dense_layer import attention_sizes
from megatron_rl.weights.families.family import FURTHER_TOKENS
from megatron_rl.weights.families.layer_fields import FULL
from megatron_rl.weights.model_shape import DeltaNetShape, ModelShape

LINEAR = "linear_attention"
# Fields of config.json that transformers' classes take without declaring them, or that are checked here alone.
READS = ("full_attention_interval", "attn_output_gate", "output_gate_type")
LEFT_OUT = {"mtp.": FURTHER_TOKENS}
# A file's tensors that the projection is made of, each with the parts that it holds one below the other. A part is
# written by its group: the tensor ``in_proj_qkvz`` has one section.
BY_GROUP = {"in_proj_qkvz": ("qkvz",), "in_proj_ba": ("ba",)}
BY_PART = {"in_proj_qkv": ("q", "k", "v"), "in_proj_z": ("z",), "in_proj_b": ("b",), "in_proj_a": ("a",)}


def refuse_other_delta_nets(hf_config: Any) -> None:
    """Raise ConfigError if a config asks for a layer that is neither a gated delta net nor full attention.

    Also raised for another activation than silu, for biases of attention, for other output gates than
    those built here, and for sizes that do not fit together.
    """
    family = hf_config.model_type
    if hf_config.hidden_act != "silu":
        raise ConfigError(f"hidden_act={hf_config.hidden_act!r} of {family} is not supported; only silu is")
    kinds = hf_config.layer_types
    if set(kinds) - {LINEAR, FULL} or len(kinds) != hf_config.num_hidden_layers:
        raise ConfigError(
            f"layer_types={quoted(kinds)} of {family} is not supported: it must name {LINEAR} or {FULL} for each of "
            f"num_hidden_layers={hf_config.num_hidden_layers} layers"
        )
    if hf_config.attention_bias:
        raise ConfigError(f"attention_bias=true of {family} is not supported; only false is")
    fields = hf_config.to_dict()  # with those that the class does not declare
    if not fields.get("attn_output_gate", True):
        raise ConfigError(f"attn_output_gate=false of {family} is not supported; only true is")
    if (gate := fields.get("output_gate_type")) not in (None, "silu", "swish"):
        raise ConfigError(f"output_gate_type={quoted(gate)} of {family} is not supported; only silu (swish) is")
    keys, values = hf_config.linear_num_key_heads, hf_config.linear_num_value_heads
    if values % keys:
        raise ConfigError(f"linear_num_key_heads={keys} of {family} does not divide linear_num_value_heads={values}")


def delta_features(hf_config: Any) -> dict[str, Any]:
    """Return keyword arguments of ModelShape for gated delta nets, and for the gated attention between them."""
    layers = tuple(i for i, kind in enumerate(hf_config.layer_types) if kind == LINEAR)
    delta = DeltaNetShape(
        layers=layers,
        key_heads=hf_config.linear_num_key_heads,
        value_heads=hf_config.linear_num_value_heads,
        key_head_dim=hf_config.linear_key_head_dim,
        value_head_dim=hf_config.linear_value_head_dim,
        conv_tokens=hf_config.linear_conv_kernel_dim,
    )
    return dict(qk_norm=True, shifted_norms=True, output_gate=True, delta=delta if layers else None)


def _rows(delta: DeltaNetShape) -> dict[str, int]:
    """Return {part of the projection, or parts side by side in a group: number of its rows over all groups}."""
    key, value, heads = delta.key_width, delta.value_width, delta.value_heads
    return {
        **{"q": key, "k": key, "v": value, "z": value, "b": heads, "a": heads},
        **{"qkvz": 2 * (key + value), "ba": 2 * heads},
    }


def delta_entries(shape: ModelShape, tensors: dict[str, Sequence[str]]) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of a gated delta net and of the norm before it.

    tensors: ``BY_GROUP`` or ``BY_PART``, the files' tensors of the projection.
    """
    delta, rows = shape.delta, _rows(shape.delta)
    fused = shape.layer_spec == "transformer_engine"
    norm = "self_attention.in_proj.layer_norm_weight" if fused else "input_layernorm.weight"

    def grouped(megatron: str, parts: dict[str, Sequence[str]]) -> Entry:
        return Entry(
            megatron=f"self_attention.{megatron}.weight",
            hf=tuple(f"linear_attn.{name}.weight" for name in parts),
            layout=Layout.GROUPS,
            groups=delta.key_heads,
            sections=tuple(tuple(rows[part] for part in held) for held in parts.values()),
        )

    def vector(name: str) -> Entry:
        return Entry(megatron=f"self_attention.{name}", hf=(f"linear_attn.{name}",), layout=Layout.SPLIT)

    return (
        Entry(megatron=norm, hf=("input_layernorm.weight",), layout=Layout.REPLICATED),
        grouped("in_proj", tensors),
        grouped("conv1d", {"conv1d": ("q", "k", "v")}),
        vector("A_log"),
        vector("dt_bias"),
        Entry(megatron="self_attention.norm.weight", hf=("linear_attn.norm.weight",), layout=Layout.REPLICATED),
        Entry(megatron="self_attention.out_proj.weight", hf=("linear_attn.out_proj.weight",), layout=Layout.COLUMNS),
    )


def mixer_sizes(shape: ModelShape, tensors: dict[str, Sequence[str]]) -> dict[str, tuple[int, ...]]:
    """Return {Hugging Face name within the layer: shape} of the tensors of gated delta nets and of gated attention.

    tensors: as in ``delta_entries``.
    """
    sizes = attention_sizes(shape)
    if shape.delta is None:
        return sizes
    delta, rows, hidden = shape.delta, _rows(shape.delta), shape.hidden_size
    projections = {name: (sum(rows[part] for part in parts), hidden) for name, parts in tensors.items()}
    own = projections | {"out_proj": (hidden, delta.value_width), "norm": (delta.value_head_dim,)}
    own["conv1d"] = (2 * delta.key_width + delta.value_width, 1, delta.conv_tokens)
    vectors = {f"linear_attn.{name}": (delta.value_heads,) for name in ("A_log", "dt_bias")}
    return sizes | {f"linear_attn.{name}.weight": size for name, size in own.items()} | vectors

"""The text models of Qwen3.5, 3.6 and dense 3.8 (``qwen3_5_text``, ``qwen3_5_moe_text``): gated delta nets.

Every fourth layer or so has gated attention. Files hold the projection of a delta net by part, in
four tensors. The mixtures have a shared expert behind a gate; their released files stack the experts
of a layer.
"""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.entry import Entry
from megatron_rl.weights.families.delta_layer import (
    BY_PART,
    LEFT_OUT,
    READS,
    delta_entries,
    delta_features,
    mixer_sizes,
    refuse_other_delta_nets,
)
from megatron_rl.weights.families.dense_layer import attention_entries, dense_layer, dense_sizes, mlp_entries
from megatron_rl.weights.families.family import ExpertNames, Family
from megatron_rl.weights.families.gated_mixture import (
    gated_mixture_entries,
    gated_mixture_features,
    gated_mixture_fields,
    gated_mixture_sizes,
)
from megatron_rl.weights.model_shape import ModelShape

TOWER = {"model.visual.": "a vision tower"}
EXPERTS = ExpertNames(
    block="mlp",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    stacked=("gate_up_proj", "down_proj"),
    halved=True,
)


def delta_layer(shape: ModelShape) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of a dense layer with a gated delta net."""
    return (*delta_entries(shape, BY_PART), *mlp_entries(shape))


def sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return {Hugging Face name within the layer: shape} of both kinds of dense layers' tensors."""
    return dense_sizes(shape) | mixer_sizes(shape, BY_PART)


def mixture_features(hf_config: Any) -> dict[str, Any]:
    """Return keyword arguments of ModelShape for delta nets, gated attention, and mixtures with a shared expert."""
    return delta_features(hf_config) | gated_mixture_features(hf_config)


def mixture_layer(shape: ModelShape) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of a layer with attention and a mixture."""
    return (*attention_entries(shape), *gated_mixture_entries(EXPERTS))


def mixture_delta_layer(shape: ModelShape) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of a layer with a delta net and a mixture."""
    return (*delta_entries(shape, BY_PART), *gated_mixture_entries(EXPERTS))


def mixture_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return {Hugging Face name within the layer: shape} of the tensors of both kinds of layers with a mixture."""
    return mixer_sizes(shape, BY_PART) | gated_mixture_sizes(EXPERTS, shape)


QWEN3_5_TEXT = Family(
    model_type="qwen3_5_text",
    turns_partly=True,
    reads=READS,
    left_out=LEFT_OUT | TOWER,
    refuse=refuse_other_delta_nets,
    features=delta_features,
    layer=dense_layer,
    delta_layer=delta_layer,
    sizes=sizes,
)

QWEN3_5_MOE_TEXT = Family(
    model_type="qwen3_5_moe_text",
    turns_partly=True,
    reads=READS,
    left_out=LEFT_OUT | TOWER,
    ffn_field="moe_intermediate_size",
    refuse=refuse_other_delta_nets,
    features=mixture_features,
    layer=mixture_layer,
    delta_layer=mixture_delta_layer,
    sizes=mixture_sizes,
    layer_fields=gated_mixture_fields,
    expert_adapters=True,
    experts=EXPERTS,
)

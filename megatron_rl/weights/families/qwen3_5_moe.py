"""The mixtures of Qwen3.5 and Qwen3.6 (``qwen3_5_moe_text``): Qwen3.5's layers, and experts beside a gated shared one.

Released files stack the experts of a layer, an expert's gate above its up.
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
from megatron_rl.weights.families.dense_layer import attention_entries
from megatron_rl.weights.families.family import ExpertNames, Family
from megatron_rl.weights.families.gated_mixture import (
    gated_mixture_entries,
    gated_mixture_features,
    gated_mixture_fields,
    gated_mixture_sizes,
)
from megatron_rl.weights.families.qwen3_5 import TOWER
from megatron_rl.weights.model_shape import ModelShape

EXPERTS = ExpertNames(
    block="mlp",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    stacked=("gate_up_proj", "down_proj"),
    halved=True,
)


def features(hf_config: Any) -> dict[str, Any]:
    """Return keyword arguments of ModelShape for delta nets, gated attention, and mixtures with a shared expert."""
    return delta_features(hf_config) | gated_mixture_features(hf_config)


def layer(shape: ModelShape) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of a layer with attention and a mixture."""
    return (*attention_entries(shape), *gated_mixture_entries(EXPERTS))


def delta_layer(shape: ModelShape) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of a layer with a delta net and a mixture."""
    return (*delta_entries(shape, BY_PART), *gated_mixture_entries(EXPERTS))


def sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return {Hugging Face name within the layer: shape} of the tensors of both kinds of layers with a mixture."""
    return mixer_sizes(shape, BY_PART) | gated_mixture_sizes(EXPERTS, shape)


QWEN3_5_MOE_TEXT = Family(
    model_type="qwen3_5_moe_text",
    turns_partly=True,
    reads=READS,
    left_out=LEFT_OUT | TOWER,
    ffn_field="moe_intermediate_size",
    refuse=refuse_other_delta_nets,
    features=features,
    layer=layer,
    delta_layer=delta_layer,
    sizes=sizes,
    layer_fields=gated_mixture_fields,
    expert_adapters=True,
    experts=EXPERTS,
)

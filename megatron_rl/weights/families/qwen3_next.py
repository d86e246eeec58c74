"""Qwen3-Next (``qwen3_next``): gated delta nets with gated attention between them, and mixtures with a shared expert.

Files hold the projection of a delta net by group, in two tensors.
"""

from __future__ import annotations

from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.weights.entry import Entry
from megatron_rl.weights.families.delta_layer import (
    BY_GROUP,
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
from megatron_rl.weights.model_shape import ModelShape

EXPERTS = ExpertNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj")


def refuse(hf_config: Any) -> None:
    """Raise ConfigError for dense layers between the mixtures, and for other layers than the two kinds built here."""
    refuse_other_delta_nets(hf_config)
    if hf_config.decoder_sparse_step != 1 or hf_config.mlp_only_layers:
        raise ConfigError(
            f"decoder_sparse_step={hf_config.decoder_sparse_step} and mlp_only_layers={hf_config.mlp_only_layers} of "
            "qwen3_next leave dense layers between the mixtures, which is not supported; only decoder_sparse_step=1 "
            "and mlp_only_layers=[] are"
        )


def features(hf_config: Any) -> dict[str, Any]:
    """Return keyword arguments of ModelShape for delta nets, gated attention, and mixtures with a shared expert."""
    pre_softmax = not hf_config.norm_topk_prob
    return delta_features(hf_config) | gated_mixture_features(hf_config) | dict(router_pre_softmax=pre_softmax)


def layer(shape: ModelShape) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of a layer with attention."""
    return (*attention_entries(shape), *gated_mixture_entries(EXPERTS))


def delta_layer(shape: ModelShape) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of a layer with a gated delta net."""
    return (*delta_entries(shape, BY_GROUP), *gated_mixture_entries(EXPERTS))


def sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return {Hugging Face name within the layer: shape} of both kinds of layers' tensors."""
    return mixer_sizes(shape, BY_GROUP) | gated_mixture_sizes(EXPERTS, shape)


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    turns_partly=True,
    reads=READS,
    left_out=LEFT_OUT,
    ffn_field="moe_intermediate_size",
    refuse=refuse,
    features=features,
    layer=layer,
    delta_layer=delta_layer,
    sizes=sizes,
    layer_fields=gated_mixture_fields,
    expert_adapters=True,
    experts=EXPERTS,
)

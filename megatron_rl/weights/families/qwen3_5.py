"""The text model of Qwen3.5, Qwen3.6 and dense Qwen3.8 (``qwen3_5_text``): gated delta nets, gated attention between.

Files hold the projection of a delta net by part, in four tensors.
"""

from __future__ import annotations

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
from megatron_rl.weights.families.dense_layer import dense_layer, dense_sizes, mlp_entries
from megatron_rl.weights.families.family import Family
from megatron_rl.weights.model_shape import ModelShape

TOWER = {"model.visual.": "a vision tower"}


def delta_layer(shape: ModelShape) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of a dense layer with a gated delta net."""
    return (*delta_entries(shape, BY_PART), *mlp_entries(shape))


def sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return {Hugging Face name within the layer: shape} of both kinds of dense layers' tensors."""
    return dense_sizes(shape) | mixer_sizes(shape, BY_PART)


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

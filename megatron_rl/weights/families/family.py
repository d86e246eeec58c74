"""The description of a family of models: how its config is read and refused, and its tensors' names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.weights.entry import Entry
from megatron_rl.weights.families.dense_layer import dense_layer, dense_sizes
from megatron_rl.weights.model_shape import ModelShape


def class_fields(config_class: type) -> set[str]:
    """Return the fields of a transformers config class; its objects also hold a file's unknown fields."""
    renamed = config_class.attribute_map
    return {field.name for field in dataclasses.fields(config_class)} | renamed.keys() | set(renamed.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Holds the Hugging Face names of a family's mixture, below ``model.layers.<layer>.``.

    stacked: the last parts of the names of tensors that hold all experts of a layer in a file
        (weights/stacked.py).
    transposed: whether a stack holds the transposes of an expert's gate and up, or down, under
        ``gate_up_proj`` and ``down_proj``. Otherwise an expert's slice of a stack is one tensor.
    """

    block: str
    gate: str
    up: str
    down: str
    stacked: tuple[str, ...] = ()
    transposed: bool = False


def nothing(*_: object) -> dict[str, Any]:
    """Return no fields."""
    return {}


def never(_: object) -> bool:
    """Return False."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Describes one family, by transformers' ``model_type``. A field's default describes a plain Llama layer.

    ffn_field:    the config's field for the width of the MLP, or of one expert.
    experts:      the names of its mixture; None for a dense family.
    reads:        the fields of a config.json that are read beside those of transformers' config
                  class.
    refuse:       raises ConfigError for a config that asks for a feature that the model built here
                  lacks.
    refuse_served: fields of a config.json and its path → raises ConfigError if vLLM would build
        another model.
    engine_arguments: the fields of a config.json → the fields of vllm.EngineArgs that make vLLM
        compute as those fields say.
    counts_pads:  config → whether its module in transformers counts pads before a prompt as
                  positions, so that there must be none.
    features:     config → the fields of ModelShape by which the family differs from a plain Llama.
    layer:        shape → the entries of one decoder layer, except its experts'. Megatron names are
                  relative to ``decoder.layers.<local>.``, Hugging Face's to
                  ``model.layers.<layer>.``.
    expert_layer: shape and number → the entries of one of this rank's experts; None for
        ``mixture_layer.expert_entries``.
    sizes:        shape → the sizes of a layer's Hugging Face tensors by the same names, except
                  norms over the hidden state; an expert's tensors have names below ``expert.``.
    first_layers: shape → the entries of a layer without a mixture, in a family that has such
        layers.
    last:         entries beside the final norm's weight, on the last stage.
    layer_fields: shape → the fields of Megatron-Core's TransformerConfig that its layers need
        beside the common ones.
    turns_partly: whether its module in transformers reads ``partial_rotary_factor``.
    turns_by_kind: whether its ``rope_parameters`` hold numbers for each kind of layer.
    expert_adapters: whether adapters on its experts were shown to work
        (tests/equality/test_adapter.py).
    bitwise:      whether ``rollout.bitwise`` was shown to work for it
                  (tests/equality/test_bitwise.py).
    """

    model_type: str
    refuse: Callable[[Any], None]
    reads: tuple[str, ...] = ()
    refuse_served: Callable[[Mapping[str, Any], str], object] = nothing
    engine_arguments: Callable[[Mapping[str, Any]], dict[str, Any]] = nothing
    counts_pads: Callable[[Any], bool] = never
    features: Callable[[Any], dict[str, Any]] = nothing
    layer: Callable[[ModelShape], tuple[Entry, ...]] = dense_layer
    sizes: Callable[[ModelShape], Mapping[str, tuple[int, ...]]] = dense_sizes
    layer_fields: Callable[[ModelShape], dict[str, Any]] = nothing
    ffn_field: str = "intermediate_size"
    first_layers: Callable[[ModelShape], tuple[Entry, ...]] | None = None
    last: tuple[Entry, ...] = ()
    expert_layer: Callable[[ModelShape, int], tuple[Entry, ...]] | None = None
    experts: ExpertNames | None = None
    turns_partly: bool = False
    turns_by_kind: bool = False
    expert_adapters: bool = False
    bitwise: bool = False

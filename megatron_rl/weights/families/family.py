"""``Family``: how the config of a family of models is read, what is refused in it, and the names of its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.weights.entry import Entry
from megatron_rl.weights.families.dense_layer import dense_layer, dense_sizes
from megatron_rl.weights.model_shape import ModelShape

FURTHER_TOKENS = "layers that predict further tokens"  # in the warning that names what is left out


def class_fields(config_class: type) -> set[str]:
    """Return the names of the fields that a transformers config class declares, with their aliases.

    A config object may have more: it also keeps unknown fields of config.json.
    """
    renamed = config_class.attribute_map
    return {field.name for field in dataclasses.fields(config_class)} | renamed.keys() | set(renamed.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Holds the Hugging Face names of a family's mixture of experts, below ``model.layers.<layer>.``.

    block: the name of the mixture's module, such as mlp.
    gate, up, down: the names of an expert's three matrices, such as gate_proj (equal if one tensor
        holds gate and up).
    stacked: the last components of the names of stacks. A stack is one tensor in a file that holds
        all experts of a layer (weights/stacked.py). () if each expert has tensors of its own.
    transposed: True if stacks hold the matrices transposed: an expert's slice of ``gate_up_proj`` is
        [gateᵀ, upᵀ] (side by side), and its slice of ``down_proj`` is downᵀ.
    halved: True if an expert's slice of ``gate_up_proj`` is gate's rows and then up's, and its slice of
        ``down_proj`` is down. If both are False, an expert's slice of a stack is the expert's tensor
        as it is.
    """

    block: str
    gate: str
    up: str
    down: str
    stacked: tuple[str, ...] = ()
    transposed: bool = False
    halved: bool = False


def nothing(*_: object) -> dict[str, Any]:
    """Return an empty dict for any arguments; the default of a family's functions that return fields."""
    return {}


def never(_: object) -> bool:
    """Return False for any argument; the default of a family's predicates."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Describes one family of models by transformers' ``model_type``. A field's default describes a plain Llama layer.

    Below, an arrow leads from a function's arguments to its result. "config" is a transformers
    config; "fields" are those of a config.json. "shape" is a ``ModelShape``.

    ffn_field: the name of the config's field with the width of the MLP, or of one expert.
    experts: the names in the family's mixture of experts; None for a dense family.
    reads: the names of config.json's fields that are read although transformers' config class lacks
        them.
    left_out: {start of names in the files: what is there} of tensors that transformers' model leaves out
        as well; a warning names them.
    refuse: config → raises ConfigError if it asks for a feature that the model built here lacks.
    refuse_served: fields, path → raises ConfigError if vLLM would build another model from this
        config.json.
    engine_arguments: fields → keyword arguments of vllm.EngineArgs that vLLM needs to compute as
        the config.json says.
    counts_pads: config → whether prompts must not be padded at the start, since the family's model
        in transformers counts the pads as positions.
    features: config → keyword arguments of ModelShape in which the family differs from a plain
        Llama.
    layer: shape → an ``Entry`` for each parameter of one decoder layer, except its experts'.
        Megatron names are relative to ``decoder.layers.<local>.`` (local: the layer's number in its
        model chunk), Hugging Face names to ``model.layers.<layer>.`` (its number in the model).
    expert_layer: shape, number → an ``Entry`` for each parameter of the expert with this number
        among the rank's experts. None if ``expert_entries`` (mixture_layer.py) gives them.
    sizes: shape → {name: shape} for each Hugging Face tensor of a layer except norms over the
        hidden state. Names are relative as in ``layer``; an expert's begin with ``expert.``.
    first_layers: as ``layer``, for the layers without a mixture in a family of mixtures; None if
        there are no such layers.
    delta_layer: as ``layer``, for the layers with a gated delta net in place of attention; None if
        there are no such layers.
    last: an ``Entry`` for each further parameter of the last pipeline stage, beside the final norm's
        weight.
    layer_fields: shape → the fields of Megatron-Core's TransformerConfig that the layers need
        beside those of every family.
    turns_partly: whether the family's model in transformers reads ``partial_rotary_factor`` (rotary
        embedding on a part of each head).
    turns_by_kind: whether ``rope_parameters`` has rotary parameters for each kind of layer, full
        attention and sliding attention.
    expert_adapters: whether LoRA adapters on experts were shown to work
        (tests/equality/test_adapter.py).
    bitwise: whether ``rollout.bitwise`` (log-probs equal to the bit in rollout and training) was
        shown to work (tests/equality/test_bitwise.py).
    """

    model_type: str
    refuse: Callable[[Any], None]
    reads: tuple[str, ...] = ()
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    refuse_served: Callable[[Mapping[str, Any], str], object] = nothing
    engine_arguments: Callable[[Mapping[str, Any]], dict[str, Any]] = nothing
    counts_pads: Callable[[Any], bool] = never
    features: Callable[[Any], dict[str, Any]] = nothing
    layer: Callable[[ModelShape], tuple[Entry, ...]] = dense_layer
    sizes: Callable[[ModelShape], Mapping[str, tuple[int, ...]]] = dense_sizes
    layer_fields: Callable[[ModelShape], dict[str, Any]] = nothing
    ffn_field: str = "intermediate_size"
    first_layers: Callable[[ModelShape], tuple[Entry, ...]] | None = None
    delta_layer: Callable[[ModelShape], tuple[Entry, ...]] | None = None
    last: tuple[Entry, ...] = ()
    expert_layer: Callable[[ModelShape, int], tuple[Entry, ...]] | None = None
    experts: ExpertNames | None = None
    turns_partly: bool = False
    turns_by_kind: bool = False
    expert_adapters: bool = False
    bitwise: bool = False

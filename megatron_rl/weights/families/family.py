"""The description of one family of models: how its config is read and refused, and how its tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.weights.entry import Entry
from megatron_rl.weights.model_shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Holds Hugging Face's names of a family's mixture, below ``model.layers.<layer>.``."""

    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Describes one family, by transformers' ``model_type``.

    ffn_field:    the config's field for the width of the MLP, or of one expert.
    experts:      the names of its mixture; None for a dense family.
    refuse:       raises ConfigError for a config that asks for a feature that the model built here lacks.
    features:     config → the fields of ModelShape by which the family differs from a plain Llama.
    layer:        shape → the entries of one decoder layer, its experts' aside. Megatron names are relative to
                  ``decoder.layers.<local>.``, Hugging Face's to ``model.layers.<layer>.``.
    sizes:        shape → the sizes of a layer's Hugging Face tensors by the same names, norms over the hidden state
                  aside; an expert's stand below ``expert.``.
    layer_fields: shape → the fields of Megatron-Core's TransformerConfig that its layers need beside the common ones.
    """

    model_type: str
    refuse: Callable[[Any], None]
    features: Callable[[Any], dict[str, Any]]
    layer: Callable[[ModelShape], tuple[Entry, ...]]
    sizes: Callable[[ModelShape], Mapping[str, tuple[int, ...]]]
    layer_fields: Callable[[ModelShape], dict[str, Any]]
    ffn_field: str = "intermediate_size"
    experts: ExpertNames | None = None

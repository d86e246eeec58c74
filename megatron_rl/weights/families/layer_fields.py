"""The fields of a config that describe its layers: sliding windows, and features that a layer built here lacks."""

from __future__ import annotations

from typing import Any

from megatron_rl.errors import ConfigError, quoted
from megatron_rl.weights.families.family import class_fields

FULL, SLIDING = "full_attention", "sliding_attention"


def windows_of(hf_config: Any) -> tuple[int, ...]:
    """Return ``ModelShape.windows``: for each layer, the number of tokens that a token attends to; 0 for no limit.

    ``layer_types`` says which layers have the window. If transformers' config class lacks
    ``layer_types``, all layers have it. The result is () if no layer has a window, or the window is
    at least as wide as ``max_position_embeddings``.

    Raises ConfigError for a layer that has neither full nor sliding attention, or a window below
    one token.

    Example: ``sliding_window=4, layer_types=["sliding_attention", "full_attention"]`` → (4, 0).
    """
    fields = hf_config.to_dict()
    window, listed = fields["sliding_window"], fields.get("layer_types")
    if "layer_types" not in class_fields(type(hf_config)):
        alike = FULL if window is None else SLIDING
        if listed and set(listed) != {alike}:
            raise ConfigError(
                f"layer_types={quoted(listed)} of {hf_config.model_type} is not supported: transformers does not read "
                f"it for that family, and gives every layer {alike}; remove it"
            )
        listed = None
    kinds = listed or [SLIDING] * hf_config.num_hidden_layers
    if set(kinds) - {FULL, SLIDING}:
        raise ConfigError(
            f"layer_types={quoted(kinds)} of {hf_config.model_type} is not supported; only {FULL} and {SLIDING} are"
        )
    if SLIDING not in kinds or (window is None and not listed):
        return ()
    if window is None or window < 1:
        raise ConfigError(
            f"sliding_window={window} of {hf_config.model_type} with {SLIDING} is no number of tokens that a token "
            "sees, itself among them; set it to 1 or more"
        )
    if window >= hf_config.max_position_embeddings:
        return ()
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def refuse_other_layers(hf_config: Any, *, windows: bool = False) -> None:
    """Raise ConfigError unless the MLP's activation is silu and every layer has full attention.

    windows: True if layers may have a sliding window. Then only the activation is checked here, and
        the layers by ``windows_of``.
    """
    family, fields = hf_config.model_type, hf_config.to_dict()
    if hf_config.hidden_act != "silu":
        raise ConfigError(f"hidden_act={hf_config.hidden_act!r} of {family} is not supported; only silu is")
    if not windows and set(kinds := fields.get("layer_types") or []) - {FULL}:
        raise ConfigError(f"layer_types={quoted(kinds)} of {family} is not supported; only {FULL} is")


def refuse_other_masks(hf_config: Any) -> None:
    """Raise ConfigError if ``is_causal`` is set to anything but true; the model built here has causal attention only.

    The field counts in every family, since transformers' masks read it.
    """
    if (causal := hf_config.to_dict().get("is_causal", True)) is not True:
        raise ConfigError(
            f"is_causal={quoted(causal)} of {hf_config.model_type} is not supported; only causal attention is"
        )


def refuse_attention_bias(hf_config: Any) -> None:
    """Raise ConfigError if ``attention_bias`` is set, which adds a bias to q, k, v and the output projection."""
    if hf_config.attention_bias:
        raise ConfigError(
            f"a {hf_config.model_type} model with attention_bias is not supported: its output projection carries a "
            "bias too"
        )

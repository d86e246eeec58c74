"""The refusals that several families share: checks of a config for features that a layer built here lacks."""

from __future__ import annotations

from typing import Any

from megatron_rl.errors import ConfigError, quoted


def refuse_other_layers(hf_config: Any, *, windows: bool = False) -> None:
    """Raise ConfigError unless the MLP's activation is silu and every layer has full attention.

    windows: True if layers may have a sliding window. Then only the activation is checked here, and
        the layers by ``windows.windows_of``.
    """
    family, fields = hf_config.model_type, hf_config.to_dict()
    if hf_config.hidden_act != "silu":
        raise ConfigError(f"hidden_act={hf_config.hidden_act!r} of {family} is not supported; only silu is")
    if not windows and set(kinds := fields.get("layer_types") or []) - {"full_attention"}:
        raise ConfigError(f"layer_types={quoted(kinds)} of {family} is not supported; only full_attention is")


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

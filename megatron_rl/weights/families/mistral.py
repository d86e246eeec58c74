"""Mistral (``mistral``): a Llama layer, its sliding window as wide as the context."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.families.family import Family
from megatron_rl.weights.families.refusals import refuse_narrow_window, refuse_other_layers


def refuse(hf_config: Any) -> None:
    """Raise ConfigError for a window narrower than the context or another kind of layer."""
    refuse_other_layers(hf_config)
    refuse_narrow_window(hf_config)


MISTRAL = Family(
    model_type="mistral",
    bitwise=True,
    refuse=refuse,
)

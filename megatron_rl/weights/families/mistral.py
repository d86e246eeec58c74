"""Mistral (``mistral``): a Llama layer, with a sliding window in its first version."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.families.family import Family
from megatron_rl.weights.families.refusals import refuse_other_layers
from megatron_rl.weights.families.windows import windows_of


def refuse(hf_config: Any) -> None:
    """Raise ConfigError for another kind of layer."""
    refuse_other_layers(hf_config, windows=True)


def features(hf_config: Any) -> dict[str, Any]:
    """Return the ModelShape fields for the layers' windows."""
    return dict(windows=windows_of(hf_config))


MISTRAL = Family(
    model_type="mistral",
    bitwise=True,
    refuse=refuse,
    features=features,
)

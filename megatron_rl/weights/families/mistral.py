"""Mistral (``mistral``): a Llama layer, with a sliding window in its first version."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.families.family import Family
from megatron_rl.weights.families.layer_fields import refuse_other_layers, windows_of


def refuse(hf_config: Any) -> None:
    """Raise ConfigError if the MLP's activation is not silu.

    ``features`` refuses layers with neither full nor sliding attention.
    """
    refuse_other_layers(hf_config, windows=True)


def features(hf_config: Any) -> dict[str, Any]:
    """Return keyword arguments of ModelShape for the layers' sliding windows."""
    return dict(windows=windows_of(hf_config))


MISTRAL = Family(
    model_type="mistral",
    bitwise=True,
    refuse=refuse,
    features=features,
)

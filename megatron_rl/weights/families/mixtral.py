"""Mixtral (``mixtral``): Mistral's attention, and a mixture of experts whose weights add up to 1 as its MLP."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.weights.families.family import ExpertNames, Family
from megatron_rl.weights.families.layer_fields import refuse_other_layers, windows_of
from megatron_rl.weights.families.mixture_layer import mixture_layer, mixture_sizes, softmax_router

EXPERTS = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


def refuse(hf_config: Any) -> None:
    """Raise ConfigError if the router has jitter noise, or an expert's activation is not silu.

    ``features`` refuses layers with neither full nor sliding attention.
    """
    refuse_other_layers(hf_config, windows=True)
    if hf_config.router_jitter_noise:
        raise ConfigError(
            f"router_jitter_noise={hf_config.router_jitter_noise} of mixtral is not supported: it draws noise per "
            "batch; set it to 0.0"
        )


def features(hf_config: Any) -> dict[str, Any]:
    """Return keyword arguments of ModelShape for the layers' sliding windows and the sizes of the mixture."""
    return dict(
        windows=windows_of(hf_config),
        num_experts=hf_config.num_local_experts,
        experts_per_token=hf_config.num_experts_per_tok,
    )


MIXTRAL = Family(
    model_type="mixtral",
    refuse=refuse,
    features=features,
    layer=partial(mixture_layer, EXPERTS),
    sizes=partial(mixture_sizes, EXPERTS),
    layer_fields=softmax_router,
    expert_adapters=True,
    experts=EXPERTS,
)

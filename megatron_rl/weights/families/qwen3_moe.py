"""Qwen3's mixtures of experts (``qwen3_moe``): Qwen3's attention; every MLP is a mixture without a shared expert."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.weights.families.family import ExpertNames, Family
from megatron_rl.weights.families.layer_fields import refuse_attention_bias, refuse_other_layers, windows_of
from megatron_rl.weights.families.mixture_layer import mixture_layer, mixture_sizes, softmax_router

EXPERTS = ExpertNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj")


def refuse(hf_config: Any) -> None:
    """Raise ConfigError for dense layers between the mixtures, attention biases, or an activation other than silu.

    ``features`` refuses layers with neither full nor sliding attention.
    """
    refuse_other_layers(hf_config, windows=True)
    refuse_attention_bias(hf_config)
    if hf_config.decoder_sparse_step != 1 or hf_config.mlp_only_layers:
        raise ConfigError(
            f"decoder_sparse_step={hf_config.decoder_sparse_step} and mlp_only_layers={hf_config.mlp_only_layers} of "
            "qwen3_moe leave dense layers between the mixtures, which is not supported; only decoder_sparse_step=1 "
            "and mlp_only_layers=[] are"
        )


def features(hf_config: Any) -> dict[str, Any]:
    """Return keyword arguments of ModelShape for norms of q and k, sliding windows, and the mixture.

    ``router_pre_softmax`` is True if the chosen experts' weights are not normalised to a sum of 1.
    """
    return dict(
        qk_norm=True,
        windows=windows_of(hf_config),
        num_experts=hf_config.num_local_experts,
        experts_per_token=hf_config.num_experts_per_tok,
        router_pre_softmax=not hf_config.norm_topk_prob,
    )


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    ffn_field="moe_intermediate_size",
    refuse=refuse,
    features=features,
    layer=partial(mixture_layer, EXPERTS),
    sizes=partial(mixture_sizes, EXPERTS),
    layer_fields=softmax_router,
    expert_adapters=True,
    experts=EXPERTS,
)

"""gpt-oss (``gpt_oss``): attention sinks, sliding windows, biases everywhere, stacked experts of a clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.weights.entry import Entry, Layout
from megatron_rl.weights.families.dense_layer import attention_entries, attention_sizes
from megatron_rl.weights.families.family import ExpertNames, Family
from megatron_rl.weights.families.layer_fields import refuse_other_layers, windows_of
from megatron_rl.weights.families.mixture_layer import softmax_router
from megatron_rl.weights.model_shape import ModelShape

EXPERTS = ExpertNames(
    block="mlp",
    gate="gate_up_proj",
    up="gate_up_proj",
    down="down_proj",
    stacked=("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"),
)
QUICK_GELU = 1.702  # the factor within the sigmoid


def refuse(hf_config: Any) -> None:
    """Raise ConfigError unless attention has biases, ``swiglu_limit`` is above 0, and the activation is gpt-oss's.

    The activation is gpt-oss's if ``hidden_act`` is silu and ``swiglu_alpha`` 1.702. ``features``
    refuses layers with neither full nor sliding attention.
    """
    refuse_other_layers(hf_config, windows=True)
    if hf_config.attention_bias is not True:
        raise ConfigError("attention_bias=false of gpt_oss is not supported; only biases on all projections are")
    if hf_config.swiglu_alpha != QUICK_GELU:
        raise ConfigError(
            f"swiglu_alpha={hf_config.swiglu_alpha} of gpt_oss is not supported; only {QUICK_GELU} is, as in vLLM"
        )
    if not hf_config.swiglu_limit > 0:
        raise ConfigError(f"swiglu_limit={hf_config.swiglu_limit} of gpt_oss is not supported; give a number above 0")


def refuse_served(fields: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError for every gpt_oss model: its log-probs under vLLM were not those that transformers gives.

    vLLM 0.32's CPU build loads every weight (``models/gpt_oss.py``); the cause of the difference is
    unknown. vLLM also ignores ``swiglu_limit`` (it uses 7.0), ``rms_norm_eps`` (1e-5) and
    ``layer_types`` (a window in every second layer).
    """
    raise ConfigError(
        f"{path} holds a gpt_oss model, for which rollout.engine=vllm was not shown: vLLM 0.32's CPU build took every "
        "weight of a small model, and its log-probs were not transformers'; use rollout.engine=transformers"
    )


def features(hf_config: Any) -> dict[str, Any]:
    """Return keyword arguments of ModelShape for biases, sinks, windows, ``swiglu_limit`` and the mixture's sizes."""
    return dict(
        qkv_bias=True,
        linear_bias=True,
        sinks=True,
        windows=windows_of(hf_config),
        swiglu_limit=float(hf_config.swiglu_limit),
        num_experts=hf_config.num_local_experts,
        experts_per_token=hf_config.num_experts_per_tok,
    )


def layer(shape: ModelShape) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of attention, the router and both norms."""
    replicated = {
        "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.router.weight": "mlp.router.weight",
        "mlp.router.bias": "mlp.router.bias",
    }
    return (
        *attention_entries(shape),
        Entry(megatron="self_attention.core_attention.softmax_offset", hf=("self_attn.sinks",), layout=Layout.SPLIT),
        *(Entry(megatron=name, hf=(hf,), layout=Layout.REPLICATED) for name, hf in replicated.items()),
    )


def expert_layer(shape: ModelShape, expert: int) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of one of this rank's experts.

    An expert's Hugging Face tensors are slices of stacks, tensors that hold all experts of a layer
    (weights/stacked.py).

    expert: the expert's number among this rank's experts.
    """
    grouped = shape.layer_spec == "transformer_engine"

    def entry(linear: str, kind: str, name: str, layout: Layout) -> Entry:
        megatron = f"{linear}.{kind}{expert}" if grouped else f"local_experts.{expert}.{linear}.{kind}"
        return Entry(
            megatron=f"mlp.experts.{megatron}", hf=(f"mlp.experts.{{expert}}.{name}",), layout=layout, expert=expert
        )

    return (
        entry("linear_fc1", "weight", "gate_up_proj", Layout.INTERLEAVED),
        entry("linear_fc1", "bias", "gate_up_proj_bias", Layout.INTERLEAVED),
        entry("linear_fc2", "weight", "down_proj", Layout.TRANSPOSED),
        entry("linear_fc2", "bias", "down_proj_bias", Layout.REPLICATED),
    )


def sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return {Hugging Face name within the layer: shape} of a layer's tensors.

    An expert's names begin with ``expert.``. Norms over the hidden state, and biases as wide as the
    hidden state, are left out.
    """
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
    return attention_sizes(shape) | {
        "self_attn.sinks": (shape.num_heads,),
        "mlp.router.weight": (shape.num_experts, hidden),
        "mlp.router.bias": (shape.num_experts,),
        "expert.gate_up_proj": (hidden, 2 * ffn),
        "expert.gate_up_proj_bias": (2 * ffn,),
        "expert.down_proj": (ffn, hidden),
    }


def layer_fields(shape: ModelShape) -> dict[str, Any]:
    """Return keyword arguments of Megatron-Core's TransformerConfig for router, biases, sinks and clamped SwiGLU.

    The router takes a softmax over the chosen experts. An expert computes activation(gate) · (up +
    1); the activation is in model/gpt_oss.py.
    """
    return softmax_router(shape) | dict(
        add_bias_linear=True,
        softmax_type="learnable",
        activation_func_clamp_value=shape.swiglu_limit,
        glu_linear_offset=1.0,
    )


GPT_OSS = Family(
    model_type="gpt_oss",
    refuse=refuse,
    refuse_served=refuse_served,
    features=features,
    layer=layer,
    expert_layer=expert_layer,
    sizes=sizes,
    layer_fields=layer_fields,
    experts=EXPERTS,
)

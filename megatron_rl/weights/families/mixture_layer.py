"""A layer with a mixture of experts under a softmax router: mapping to Hugging Face, tensor shapes, and settings."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.entry import Entry, Layout
from megatron_rl.weights.families.dense_layer import attention_entries, attention_sizes
from megatron_rl.weights.families.family import ExpertNames
from megatron_rl.weights.model_shape import ModelShape


def mixture_layer(names: ExpertNames, shape: ModelShape) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of a layer with a mixture, except its experts'.

    names: the Hugging Face names of the family's experts.
    """
    return (*attention_entries(shape), *router_entries(names))


def router_entries(names: ExpertNames) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for a mixture's router and for the norm before the mixture.

    names: the Hugging Face names of the family's experts.
    """
    # The router reads the normed hidden state too, so Transformer Engine's spec fuses no norm into the experts (0.16.1
    # gpt_layer_specs.py).
    return (
        Entry(megatron="pre_mlp_layernorm.weight", hf=("post_attention_layernorm.weight",), layout=Layout.REPLICATED),
        Entry(megatron="mlp.router.weight", hf=(f"{names.block}.gate.weight",), layout=Layout.REPLICATED),
    )


def expert_entries(names: ExpertNames, shape: ModelShape, expert: int) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of one of this rank's experts.

    Names are relative to the layer. Under the torch spec each expert is an MLP (0.16.1 and 0.19.2
    ``moe/experts.py`` SequentialMLP). Under Transformer Engine's spec all experts are one grouped
    linear, with a weight per expert (TEGroupedMLP).

    names: the Hugging Face names of the family's experts.
    expert: the expert's number among this rank's experts.
    """
    within = f"{names.block}.experts.{{expert}}"
    grouped = shape.layer_spec == "transformer_engine"
    fc1, fc2 = (
        f"mlp.experts.{x}.weight{expert}" if grouped else f"mlp.experts.local_experts.{expert}.{x}.weight"
        for x in ("linear_fc1", "linear_fc2")
    )
    gate_up = (f"{within}.{names.gate}.weight", f"{within}.{names.up}.weight")
    return (
        Entry(megatron=fc1, hf=gate_up, layout=Layout.GATE_UP, expert=expert),
        Entry(megatron=fc2, hf=(f"{within}.{names.down}.weight",), layout=Layout.COLUMNS, expert=expert),
    )


def mixture_sizes(names: ExpertNames, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return {Hugging Face name within the layer: shape} of a layer's tensors, except norms over the hidden state.

    An expert's names begin with ``expert.``.
    """
    return attention_sizes(shape) | expert_sizes(names, shape)


def expert_sizes(names: ExpertNames, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return {Hugging Face name within the layer: shape} of a mixture's tensors: the router's, and one expert's.

    An expert's names begin with ``expert.``.
    """
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
    return {
        f"{names.block}.gate.weight": (shape.num_experts, hidden),
        f"expert.{names.gate}.weight": (ffn, hidden),
        f"expert.{names.up}.weight": (ffn, hidden),
        f"expert.{names.down}.weight": (hidden, ffn),
    }


def softmax_router(shape: ModelShape) -> dict[str, Any]:
    """Return keyword arguments of Megatron-Core's TransformerConfig for a mixture with a softmax router.

    The router takes the k experts of highest probability.
    """
    return dict(
        num_moe_experts=shape.num_experts,
        moe_ffn_hidden_size=shape.ffn_hidden_size,
        moe_router_topk=shape.experts_per_token,
        moe_router_score_function="softmax",
        moe_router_pre_softmax=shape.router_pre_softmax or shape.experts_per_token == 1,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_z_loss_coeff=None,
        moe_grouped_gemm=shape.layer_spec == "transformer_engine",
    )

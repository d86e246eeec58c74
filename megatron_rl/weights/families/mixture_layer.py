"""A layer whose MLP is a mixture of experts under a softmax router: entries, sizes and Megatron-Core's fields."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.entry import Entry, Layout
from megatron_rl.weights.families.dense_layer import attention_entries, attention_sizes
from megatron_rl.weights.families.family import ExpertNames
from megatron_rl.weights.model_shape import ModelShape


def mixture_layer(names: ExpertNames, shape: ModelShape) -> tuple[Entry, ...]:
    """Return the entries of a layer with a router, without its experts (``expert_entries``).

    The router reads the normed state too, so Transformer Engine's spec fuses no norm into the
    experts (0.16.1 ``gpt_layer_specs.py``).
    """
    return (
        *attention_entries(shape),
        Entry(megatron="pre_mlp_layernorm.weight", hf=("post_attention_layernorm.weight",), layout=Layout.REPLICATED),
        Entry(megatron="mlp.router.weight", hf=(f"{names.block}.gate.weight",), layout=Layout.REPLICATED),
    )


def expert_entries(names: ExpertNames, shape: ModelShape, expert: int) -> tuple[Entry, ...]:
    """Return the entries of one of this rank's experts, with names as in ``mixture_layer``.

    The torch spec makes each expert an MLP (0.16.1 and 0.19.2 ``moe/experts.py`` SequentialMLP).
    Transformer Engine's spec makes one grouped linear of all experts, with a weight per expert
    (TEGroupedMLP; run on a stand-in, not on a GPU).
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
    """Return the sizes of a layer's tensors, except norms over the hidden state."""
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
    return attention_sizes(shape) | {
        f"{names.block}.gate.weight": (shape.num_experts, hidden),
        f"expert.{names.gate}.weight": (ffn, hidden),
        f"expert.{names.up}.weight": (ffn, hidden),
        f"expert.{names.down}.weight": (hidden, ffn),
    }


def softmax_router(shape: ModelShape) -> dict[str, Any]:
    """Return TransformerConfig's fields of a mixture whose router takes the k highest of a softmax."""
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

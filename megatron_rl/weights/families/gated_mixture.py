"""A mixture of experts with a shared expert behind a gate (Qwen3-Next, Qwen3.5): mapping, shapes and settings."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.entry import Entry, Layout
from megatron_rl.weights.families.family import ExpertNames
from megatron_rl.weights.families.mixture_layer import expert_sizes, router_entries, softmax_router
from megatron_rl.weights.model_shape import ModelShape


def gated_mixture_features(hf_config: Any) -> dict[str, Any]:
    """Return keyword arguments of ModelShape for a mixture with a gated shared expert."""
    return dict(
        num_experts=hf_config.num_experts,
        experts_per_token=hf_config.num_experts_per_tok,
        shared_ffn_hidden_size=hf_config.shared_expert_intermediate_size,
        shared_gate=True,
    )


def gated_mixture_entries(names: ExpertNames) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of the mixture except its routed experts'.

    The norm before the mixture is included.

    names: the Hugging Face names of the family's experts.
    """
    shared, own = "mlp.shared_experts", f"{names.block}.shared_expert"
    gate_up = (f"{own}.gate_proj.weight", f"{own}.up_proj.weight")
    return (
        *router_entries(names),
        Entry(megatron=f"{shared}.linear_fc1.weight", hf=gate_up, layout=Layout.GATE_UP),
        Entry(megatron=f"{shared}.linear_fc2.weight", hf=(f"{own}.down_proj.weight",), layout=Layout.COLUMNS),
        Entry(megatron=f"{shared}.gate_weight", hf=(f"{own}_gate.weight",), layout=Layout.REPLICATED),
    )


def gated_mixture_sizes(names: ExpertNames, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return {Hugging Face name within the layer: shape} of the mixture's tensors, one expert's among them.

    names: the Hugging Face names of the family's experts.
    """
    hidden, shared, own = shape.hidden_size, shape.shared_ffn_hidden_size, f"{names.block}.shared_expert"
    return expert_sizes(names, shape) | {
        f"{own}.gate_proj.weight": (shared, hidden),
        f"{own}.up_proj.weight": (shared, hidden),
        f"{own}.down_proj.weight": (hidden, shared),
        f"{own}_gate.weight": (1, hidden),
    }


def gated_mixture_fields(shape: ModelShape) -> dict[str, Any]:
    """Return keyword arguments of Megatron-Core's TransformerConfig for a mixture with a gated shared expert."""
    return softmax_router(shape) | dict(
        moe_shared_expert_intermediate_size=shape.shared_ffn_hidden_size,
        moe_shared_expert_gate=True,
    )

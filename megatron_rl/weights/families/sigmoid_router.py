"""A mixture of experts under a sigmoid router with a correction bias, with shared experts and first layers of one MLP.

The router is DeepSeek-V3's (arXiv 2412.19437, eq. 12 to 16); GLM-4.5 has it too. An expert's score
is the sigmoid of its logit in float32. The experts with the k highest values of score + bias are
chosen. If experts are in groups, they come only from the groups with the highest sums of their two
best values. A chosen expert's weight is its score without the bias, divided by the sum of the
chosen scores and multiplied by a factor. The first layers have one MLP instead of a mixture.
"""

from __future__ import annotations

from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.weights.entry import ROUTER_BIAS, Entry, Layout
from megatron_rl.weights.families.family import ExpertNames
from megatron_rl.weights.model_shape import ModelShape

EXPERTS = ExpertNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj")


def refuse_other_routers(hf_config: Any) -> None:
    """Raise ConfigError if a config chooses or weights experts in a way that Megatron-Core's router does not compute.

    Megatron-Core's router always divides the weights of a token's several experts by their sum. It
    ranks a group of experts by the group's best num_experts_per_tok // topk_group experts, while
    transformers takes the best two. A config without shared experts is an error too.
    """
    # 0.16.1 moe/moe_utils.py: topk_routing_with_score_function divides, group_limited_topk ranks.
    family, chosen = hf_config.model_type, hf_config.num_experts_per_tok
    if hf_config.norm_topk_prob != (chosen > 1):
        raise ConfigError(
            f"norm_topk_prob={str(hf_config.norm_topk_prob).lower()} of {family} with num_experts_per_tok={chosen} is "
            "not supported: Megatron-Core's sigmoid router divides the weights of several experts by their sum, and "
            "never that of one"
        )
    groups, taken = hf_config.n_group, hf_config.topk_group
    if taken < groups and chosen // taken != 2:
        raise ConfigError(
            f"n_group={groups} and topk_group={taken} of {family} with num_experts_per_tok={chosen} are not supported: "
            "a group is ranked by its two best experts in transformers and by its num_experts_per_tok // topk_group "
            "best in Megatron-Core, which must be 2"
        )
    if not hf_config.n_shared_experts:
        raise ConfigError(f"n_shared_experts={hf_config.n_shared_experts} of {family} is not supported; give 1 or more")


def sigmoid_features(hf_config: Any) -> dict[str, Any]:
    """Return keyword arguments of ModelShape for a mixture under a sigmoid router, from its Hugging Face config."""
    limited = hf_config.topk_group < hf_config.n_group
    dense = min(hf_config.first_k_dense_replace, hf_config.num_hidden_layers)
    return dict(
        num_experts=hf_config.num_local_experts,
        experts_per_token=hf_config.num_experts_per_tok,
        num_dense_layers=dense,
        dense_ffn_hidden_size=hf_config.intermediate_size if dense else 0,
        shared_ffn_hidden_size=hf_config.moe_intermediate_size * hf_config.n_shared_experts,
        router_groups=hf_config.n_group if limited else 0,
        router_groups_per_token=hf_config.topk_group if limited else 0,
        router_scaling=float(hf_config.routed_scaling_factor),
        router_bias=True,
    )


def router_entries() -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of the router and the shared expert.

    Included are the norm before the mixture, and the router's correction bias, a frozen buffer.
    """
    return (
        Entry(megatron="pre_mlp_layernorm.weight", hf=("post_attention_layernorm.weight",), layout=Layout.REPLICATED),
        Entry(megatron="mlp.router.weight", hf=("mlp.gate.weight",), layout=Layout.REPLICATED),
        Entry(
            megatron="mlp.shared_experts.linear_fc1.weight",
            hf=("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
            layout=Layout.GATE_UP,
        ),
        Entry(
            megatron="mlp.shared_experts.linear_fc2.weight",
            hf=("mlp.shared_experts.down_proj.weight",),
            layout=Layout.COLUMNS,
        ),
        Entry(megatron=ROUTER_BIAS, hf=("mlp.gate.e_score_correction_bias",), layout=Layout.REPLICATED, frozen=True),
    )


def sigmoid_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return {Hugging Face name within the layer: shape} of a mixture's tensors, and of a dense first layer's MLP.

    An expert's names begin with ``expert.``.
    """
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
    shared, dense = shape.shared_ffn_hidden_size, shape.dense_ffn_hidden_size
    return {
        "mlp.gate.weight": (shape.num_experts, hidden),
        "mlp.gate.e_score_correction_bias": (shape.num_experts,),
        "expert.gate_proj.weight": (ffn, hidden),
        "expert.up_proj.weight": (ffn, hidden),
        "expert.down_proj.weight": (hidden, ffn),
        "mlp.shared_experts.gate_proj.weight": (shared, hidden),
        "mlp.shared_experts.up_proj.weight": (shared, hidden),
        "mlp.shared_experts.down_proj.weight": (hidden, shared),
        "mlp.gate_proj.weight": (dense, hidden),
        "mlp.up_proj.weight": (dense, hidden),
        "mlp.down_proj.weight": (hidden, dense),
    }


def sigmoid_router(shape: ModelShape) -> dict[str, Any]:
    """Return keyword arguments of Megatron-Core's TransformerConfig for a mixture under a sigmoid router.

    The correction bias is a buffer of Megatron-Core's router. model/build.py keeps the checkpoint's
    value in it.
    """
    by_layer = [int(layer >= shape.num_dense_layers) for layer in range(shape.num_layers)]
    return dict(
        num_moe_experts=shape.num_experts,
        moe_ffn_hidden_size=shape.ffn_hidden_size,
        moe_layer_freq=by_layer if shape.num_dense_layers else 1,
        moe_shared_expert_intermediate_size=shape.shared_ffn_hidden_size,
        moe_router_topk=shape.experts_per_token,
        moe_router_score_function="sigmoid",
        moe_router_dtype="fp32",
        moe_router_enable_expert_bias=True,
        moe_router_num_groups=shape.router_groups or None,
        moe_router_group_topk=shape.router_groups_per_token or None,
        moe_router_topk_scaling_factor=shape.router_scaling,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_z_loss_coeff=None,
        moe_grouped_gemm=shape.layer_spec == "transformer_engine",
    )

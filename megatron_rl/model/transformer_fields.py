"""``megatron.transformer.*``: the user's fields of Megatron-Core's TransformerConfig, and those that are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_rl.config import Config
from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)
from megatron_rl.errors import ConfigError
from megatron_rl.model.megatron_fields import Refusals, resolve_fields

from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

_SEAM = "the token-sum seam owns it: the loss is a sum, nothing divides and backend/schedule.py reduces once"
_SHAPE = "it comes from the Hugging Face config in model.hf_path"
_SECTION = "it is set by {}"
_FIELDS = {field.name for field in dataclasses.fields(TransformerConfig)}
OWNED_FIELDS = {
    **dict.fromkeys(
        ("calculate_per_token_loss", "finalize_model_grads_func", "no_sync_func", "grad_sync_func", "param_sync_func"),
        _SEAM,
    ),
    **dict.fromkeys(("grad_scale_func", "variable_seq_lengths", "deallocate_pipeline_outputs", "timers"), _SEAM),
    **dict.fromkeys(
        (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "normalization",
            "layernorm_epsilon",
            "qk_layernorm",
            "gated_linear_unit",
            "activation_func",
            "add_bias_linear",
            "add_qkv_bias",
        ),
        _SHAPE,
    ),
    **dict.fromkeys(
        (
            "rotary_interleaved",
            "layernorm_zero_centered_gamma",
            "window_size",
            "softmax_scale",
            "softmax_type",
            "multi_latent_attention",
            "attention_output_gate",
            "qk_l2_norm",
            "apply_residual_connection_post_layernorm",
            "activation_func_clamp_value",
            "glu_linear_offset",
            "no_rope_freq",
            "experimental_attention_variant",
            "heterogeneous_block_specs",
        ),
        _SHAPE,
    ),
    **dict.fromkeys(
        (
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "pipeline_model_parallel_layout",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        ),
        "weights/mapping.py splits the layers evenly over the stages",
    ),
    **dict.fromkeys(
        (
            "defer_embedding_wgrad_compute",
            "num_microbatches_with_partial_activation_checkpoints",
            "hybrid_context_parallel",
            "overlap_moe_expert_parallel_comm",
        ),
        "it needs a schedule or a finalize that backend/schedule.py does not run",
    ),
    "tensor_model_parallel_size": _SECTION.format("parallel.tensor"),
    "pipeline_model_parallel_size": _SECTION.format("parallel.pipeline"),
    "virtual_pipeline_model_parallel_size": _SECTION.format("parallel.virtual_pipeline"),
    **{name: _SECTION.format("rollout.routing_replay") for name in ("moe_enable_routing_replay",) if name in _FIELDS},
    "microbatch_group_size_per_vp_stage": "the planner cuts micro-batches for groups of parallel.pipeline",
    "sequence_parallel": _SECTION.format("parallel.sequence_parallel"),
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), _SECTION.format("model.dtype")),
    "context_parallel_size": _SECTION.format("parallel.context"),
    "expert_model_parallel_size": _SECTION.format("parallel.expert"),
    "expert_tensor_parallel_size": _SECTION.format("parallel.expert_tensor"),
    **dict.fromkeys(
        (
            "num_moe_experts",
            "moe_ffn_hidden_size",
            "moe_router_topk",
            "moe_router_score_function",
            "moe_router_pre_softmax",
            "moe_layer_freq",
            "moe_shared_expert_intermediate_size",
            "moe_shared_expert_gate",
            "moe_apply_probs_on_input",
            "moe_router_num_groups",
            "moe_router_group_topk",
            "moe_router_topk_limited_devices",
            "moe_router_topk_scaling_factor",
            "moe_latent_size",
        ),
        _SHAPE,
    ),
    **{
        name: "model.layer_spec decides how experts lie in memory, and weights/mapping.py knows its two ways"
        for name in (
            "moe_grouped_gemm",
            "moe_extended_tp",
            "moe_use_legacy_grouped_gemm",
            "moe_single_grouped_weight",
            "moe_mlp_glu_interleave_size",
        )
        if name in _FIELDS
    },  # 0.16.1 and 0.19.2 each have some of these fields
}
_FP8_PARTS = "of FP8 the products of the layers' linears are built here, and no more"
_FP8_ROUTES = "it routes pads to experts, and Megatron-Core's grouped linears pad by themselves"
_CUDA_GRAPH = "a CUDA graph replays one shape, and every micro-batch here has its own"
UNSUPPORTED_FIELDS = {
    name: reason
    for name, reason in {
        "fp4": "it needs a Blackwell GPU, and nothing is built for it here",
        **dict.fromkeys(("fp8_param", "fp8_output_proj", "fp8_quantizer_factory"), _FP8_PARTS),
        **dict.fromkeys(("fp8_dot_product_attention", "fp8_multi_head_attention"), _FP8_PARTS),
        **dict.fromkeys(("moe_router_padding_for_fp8", "moe_router_padding_for_quantization"), _FP8_ROUTES),
        **dict.fromkeys(("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"), _CUDA_GRAPH),
        "tp_comm_overlap": "it needs Transformer Engine's user buffers (initialize_ub), which have one size, and "
        "every micro-batch here has its own",
        "moe_pad_expert_input_to_capacity": "it pads each expert to its capacity, and drops the tokens above it by "
        "the other tokens of the micro-batch",
        "delay_wgrad_compute": "weight gradients would wait for a call that the schedule here does not make",
    }.items()
    if name in _FIELDS
}  # 0.16.1 and 0.19.2 each have some of these fields
REFUSED_TRANSFORMER_FIELDS = Refusals(owned=OWNED_FIELDS, unsupported=UNSUPPORTED_FIELDS)


FP8_RECIPES = ("tensorwise", "blockwise", "delayed")


def transformer_fields(config: Config) -> dict[str, Any]:
    """Return the user's fields, typed as TransformerConfig wants them. Raises ConfigError for one that is refused."""
    fields = resolve_fields(
        config.megatron.transformer, TransformerConfig, "megatron.transformer", REFUSED_TRANSFORMER_FIELDS
    )
    return _with_fp8(fields, config) if fields.get("fp8") else fields


def _with_fp8(fields: dict[str, Any], config: Config) -> dict[str, Any]:
    """Return the fields with those that FP8 needs here; raise ConfigError where FP8 cannot work.

    Delayed scaling reduces its history of maxima at the end of every micro-batch (Transformer Engine 2.3 to 2.20,
    pytorch/quantization.py). Data-parallel ranks run different numbers of micro-batches here, silent ones none, and
    would wait for each other for ever; tensor and context ranks run the same, and only these take part.
    """
    recipe = fields.get("fp8_recipe", "delayed")
    if recipe not in FP8_RECIPES:
        raise ConfigError(
            f"megatron.transformer.fp8_recipe={recipe}: FP8 is built here for {', '.join(FP8_RECIPES)} (of the "
            "others, mxfp8 needs a Blackwell GPU)"
        )
    if recipe == "delayed" and not fields.get("tp_only_amax_red", True):
        raise ConfigError(
            "megatron.transformer.tp_only_amax_red=false would have data-parallel ranks wait for each other after "
            "every micro-batch, and they run different numbers of them; remove it, or take another fp8_recipe"
        )
    if config.lora.rank is not None:
        raise ConfigError(
            f"lora.rank={config.lora.rank} trains adapters, whose products are of model.dtype, beside frozen weights "
            "whose products FP8 would round by themselves, which was not run; remove megatron.transformer.fp8 or "
            "lora.rank"
        )
    return fields | {"tp_only_amax_red": True}

"""The checks of ``megatron.transformer.*``, a user's fields of TransformerConfig, and the fields that are refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from megatron_rl.config.model import ModelConfig
from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.model.megatron_fields import OFF, Refusals, resolve_fields

from megatron.core.transformer.moe import moe_utils  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

_SEAM = "the token-sum seam owns it: the loss is a sum, nothing divides and backend/schedule.py reduces once"
_SHAPE = "it comes from the Hugging Face config in model.hf_path"
_SECTION = "it is set by {}"
_OWNED = {  # by reason
    _SEAM: (
        *("calculate_per_token_loss", "finalize_model_grads_func", "no_sync_func", "grad_sync_func"),
        *("param_sync_func", "grad_scale_func", "moe_grad_scale_func", "mtp_grad_scale_func"),
        *("experimental_attention_variant_loss_scale_func", "variable_seq_lengths", "deallocate_pipeline_outputs"),
        "timers",
    ),
    _SHAPE: (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        *("normalization", "layernorm_epsilon", "qk_layernorm", "gated_linear_unit", "activation_func"),
        *("add_bias_linear", "add_qkv_bias", "rotary_interleaved", "layernorm_zero_centered_gamma", "window_size"),
        *("window_attn_skip_freq", "softmax_scale", "softmax_type", "multi_latent_attention", "attention_output_gate"),
        *("qk_l2_norm", "apply_residual_connection_post_layernorm", "activation_func_clamp_value"),
        *("glu_linear_offset", "no_rope_freq", "experimental_attention_variant", "heterogeneous_block_specs"),
        *("num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_score_function"),
        *("moe_router_pre_softmax", "moe_layer_freq", "moe_shared_expert_intermediate_size"),
        *("moe_shared_expert_gate", "moe_apply_probs_on_input", "moe_router_num_groups", "moe_router_group_topk"),
        *("moe_router_topk_limited_devices", "moe_router_topk_scaling_factor", "moe_latent_size"),
        *("use_mup", "mup_width_mult", "mup_base_hidden_size", "mup_embedding_mult", "mup_output_mult"),
        *("mup_base_head_dim", "mup_attn_scale_power"),
    ),
    "weights/mapping.py splits weights over tensor ranks, and no further": (
        *("tensor_parallel_num_weight_shards", "gtp_weight_remat_size"),
        *("expert_tensor_parallel_num_weight_shards", "expert_gtp_weight_remat_size"),
    ),
    "it needs a schedule or a finalize that backend/schedule.py does not run": (
        *("defer_embedding_wgrad_compute", "num_microbatches_with_partial_activation_checkpoints"),
        *("hybrid_context_parallel", "overlap_moe_expert_parallel_comm"),
    ),
    "the planner cuts micro-batches for groups of parallel.pipeline": ("microbatch_group_size_per_vp_stage",),
    "parallel.virtual_pipeline decides it; otherwise shapes could arrive crossed": (
        *("overlap_p2p_comm", "batch_p2p_comm"),
    ),
    "every weight is read from the model's files": ("perform_initialization",),
    "model.layer_spec decides how experts lie in memory, and weights/mapping.py knows its two ways": (
        *("use_grouped_gemm_for_shared_expert", "use_grouped_gemm_for_dense_mlp"),
        *("moe_grouped_gemm", "moe_extended_tp", "moe_use_legacy_grouped_gemm", "moe_single_grouped_weight"),
        *("moe_single_grouped_bias", "moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"),
    ),
    **{
        _SECTION.format(key): names
        for key, names in {
            "parallel.tensor": ("tensor_model_parallel_size",),
            "parallel.pipeline": ("pipeline_model_parallel_size",),
            "parallel.pipeline_layout": (
                *("pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split"),
                *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
                "account_for_loss_in_pipeline_split",
            ),
            "parallel.virtual_pipeline": ("virtual_pipeline_model_parallel_size",),
            "parallel.sequence_parallel": ("sequence_parallel",),
            "parallel.context": ("context_parallel_size",),
            "parallel.expert": ("expert_model_parallel_size",),
            "parallel.expert_tensor": ("expert_tensor_parallel_size",),
            "rollout.routing_replay": ("moe_enable_routing_replay",),
            "model.dtype": ("params_dtype", "pipeline_dtype", "bf16", "fp16", "enable_autocast", "autocast_dtype"),
        }.items()
    },
}
_FP8_PARTS = "FP8 is supported here only in the products of the layers' linears"
_FP8_ROUTES = "it routes pads to experts, and Megatron-Core's grouped linears pad by themselves"
_CUDA_GRAPH = "a CUDA graph replays one shape, and every micro-batch here has its own"
_WAITS = "weight gradients would wait for a call that the schedule here does not make"
_RANDOM = "it routes by numbers drawn at random, which the rollout engine lacks"
_CAPACITY = "it drops the tokens above a rank's capacity, by the other tokens of the micro-batch"
_UNSUPPORTED_FIELDS = {
    "fp4": "it needs a Blackwell GPU, and nothing is built for it here",
    **dict.fromkeys(("fp8_param", "fp8_output_proj", "fp8_quantizer_factory"), _FP8_PARTS),
    **dict.fromkeys(("fp8_dot_product_attention", "fp8_multi_head_attention"), _FP8_PARTS),
    **dict.fromkeys(("moe_router_padding_for_fp8", "moe_router_padding_for_quantization"), _FP8_ROUTES),
    **dict.fromkeys(("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"), _CUDA_GRAPH),
    **dict.fromkeys(("delay_wgrad_compute", "overlap_dispatch_backward_with_experts_wgrad"), _WAITS),
    **dict.fromkeys(("moe_expert_rank_capacity_factor", "moe_paged_stash"), _CAPACITY),
    "tp_comm_overlap": "it needs Transformer Engine's user buffers (initialize_ub), which have one size, and "
    "every micro-batch here has its own",
    "moe_pad_expert_input_to_capacity": "it pads each expert to its capacity, and drops the tokens above it by "
    "the other tokens of the micro-batch",
    **dict.fromkeys(("moe_router_force_biased", "moe_router_force_load_balancing"), _RANDOM),
    "fused_single_qkv_rope": "Megatron-Core has it for padded batches alone, and every micro-batch here is packed",
    "init_model_with_meta_device": "only Megatron-Core's FSDP fills such weights, and it does not run here",
    "qk_clip": "a call of Megatron-LM's training loop clips the weights, and it does not run here",
    "test_mode": "it is for the layers of Megatron-Core's own tests",
    "use_ring_exchange_p2p": "torch as published has no ring_exchange",
}
REFUSED_TRANSFORMER_FIELDS = Refusals.of(
    TransformerConfig,
    owned={name: reason for reason, names in _OWNED.items() for name in names},
    unsupported=_UNSUPPORTED_FIELDS,
)
# Fields that are set here for every family, but a user's value wins. They change how numbers are
# computed, or add dropout, which skip.mode judges.
USERS_CHOICE = frozenset(
    (
        *("attention_dropout", "hidden_dropout", "use_cpu_initialization", "deterministic_mode", "attention_backend"),
        *("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"),
        "gradient_accumulation_fusion",
    )
)
_ENGINE_LAYERS = (
    *("fp8", "cpu_offloading", "fine_grained_activation_offloading", "symmetric_ar_type", "use_te_activation_func"),
)
_ENGINE_KERNELS = {"moe_permute_fusion": "fused_permute", "moe_router_fusion": "fused_topk_with_score_function"}
_BALANCED_BY_LOSS = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")
FP8_RECIPES = ("tensorwise", "blockwise", "delayed")


def transformer_fields(users: Mapping[str, Any], *, lora_rank: int | None) -> dict[str, Any]:
    """Return the user's fields of TransformerConfig, converted to the types that it declares.

    users: ``megatron.transformer``.
    lora_rank: ``lora.rank``; None without LoRA.

    Raises ConfigError for a refused field or value.
    """
    fields = resolve_fields(users, TransformerConfig, "megatron.transformer", REFUSED_TRANSFORMER_FIELDS)
    balancing = fields.get("moe_router_load_balancing_type", "none")
    if any(kind not in _BALANCED_BY_LOSS for kind in (balancing if isinstance(balancing, list) else [balancing])):
        raise ConfigError(
            f"megatron.transformer.moe_router_load_balancing_type={balancing} would choose experts by the other tokens "
            f"of a micro-batch, and the rollout engine does not; take one of {', '.join(_BALANCED_BY_LOSS)}, or remove "
            "it"
        )
    if (layers := fields.get("recompute_num_layers")) is not None and layers < 1:
        raise ConfigError(
            f"megatron.transformer.recompute_num_layers={layers} never finishes a forward pass under "
            "recompute_method=uniform: it is the number of layers recomputed at a time; give 1 or more, or remove it"
        )
    return _with_fp8(fields, lora_rank) if fields.get("fp8") else fields


def overruled(settled: Mapping[str, Any], extra: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return {field: value} of TransformerConfig: the user's value if the user gave one, else that in ``settled``.

    settled: the fields that the family, the topology and the token-sum loss need.
    extra: the user's fields.
    family: the model's family, for messages.

    Raises ConfigError for a user's value that would change the model. Only the fields in
    USERS_CHOICE may differ from ``settled``.
    """
    for name in sorted((settled.keys() & extra.keys()) - USERS_CHOICE):
        if extra[name] != settled[name]:
            raise ConfigError(
                f"megatron.transformer.{name}={quoted(extra[name])} is refused: it is {quoted(settled[name])} for a "
                f"model of {family}, whose weights need that value; remove it"
            )
    return {**settled, **extra}


def build_config(cls: type, settled: dict[str, Any], extra: dict[str, Any], family: str) -> TransformerConfig:
    """Return Megatron-Core's config with the fields ``settled`` and ``extra``.

    cls: TransformerConfig or a subclass.
    settled: the fields that the family, the topology and the token-sum loss need.
    extra: the user's fields.
    family: the model's family, for messages.

    Raises ConfigError if a user's value differs from ``settled`` in a field outside USERS_CHOICE, or
    if Megatron-Core refuses the fields. The message then names the user's fields that seem to cause
    the refusal.
    """
    fields = overruled(settled, extra, family)
    fault = _fault(cls, fields)
    if not fault:
        return cls(**fields)
    # the fields that cause the same error alone; else those whose removal avoids it; else all
    names = [name for name in extra if str(_fault(cls, settled | {name: extra[name]})) == str(fault)]
    names = names or [x for x in extra if not _fault(cls, settled | {y: extra[y] for y in extra if y != x})]
    raise ConfigError(
        f"Megatron-Core's TransformerConfig refuses "
        f"{', '.join(f'megatron.transformer.{x}={quoted(extra[x])}' for x in names or extra) or f'a {family} model'}: "
        f"{fault}; give what it asks for, or remove {', '.join(names or extra) or 'the section megatron.transformer'}"
    ) from fault


def _fault(cls: type, fields: Mapping[str, Any]) -> Exception | None:
    """Return the error that ``cls(**fields)`` raises; None if it raises none."""
    try:
        cls(**fields)
    except (AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError) as error:
        return error
    return None


def require_installed(users: Mapping[str, Any], model: ModelConfig, layer_spec: str) -> None:
    """Raise ConfigError if a field of ``megatron.transformer`` needs layers or kernels that this host lacks.

    users: ``megatron.transformer``.
    model: the settings ``model.*``, for messages.
    layer_spec: "transformer_engine" or "torch", whose layers are built.
    """
    wanted = {name: value for name, value in users.items() if value not in OFF}
    for name in _ENGINE_LAYERS:
        if name in wanted and layer_spec != "transformer_engine":
            raise ConfigError(
                f"megatron.transformer.{name}={wanted[name]} needs Transformer Engine's layers, and these are "
                f"{layer_spec}'s (model.layer_spec={model.layer_spec}, model.dtype={model.dtype}); "
                f"install Transformer Engine, or remove megatron.transformer.{name}"
            )
    for name, kernel in _ENGINE_KERNELS.items():
        if name in wanted and vars(moe_utils).get(kernel) is None:
            raise ConfigError(
                f"megatron.transformer.{name}={wanted[name]} needs {kernel} of Transformer Engine, which is not "
                f"installed, or too old; install it, or remove megatron.transformer.{name}"
            )
    name, extension = "gradient_accumulation_fusion", "fused_weight_gradient_mlp_cuda"
    if name in wanted and importlib.util.find_spec(extension) is None:
        raise ConfigError(
            f"megatron.transformer.{name}={wanted[name]} needs Apex's {extension}, which is not installed; remove it: "
            "without it the product adds a weight's gradient to main_grad on a GPU"
        )


def _with_fp8(fields: dict[str, Any], lora_rank: int | None) -> dict[str, Any]:
    """Return the fields with ``tp_only_amax_red=True``, which FP8 needs here.

    FP8's delayed scaling reduces its history of maxima over ranks at the end of every micro-batch
    (Transformer Engine 2.3 to 2.20, pytorch/quantization.py). Here data-parallel ranks run
    different numbers of micro-batches, so they would wait for each other for ever. Tensor and
    context ranks run equal numbers. So the reduction is limited to them.

    Raises ConfigError if FP8 cannot work under these settings.
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
    if lora_rank is not None:
        raise ConfigError(
            f"lora.rank={lora_rank} with FP8 was not tested: the adapters' products are of model.dtype, and FP8 would "
            "round the frozen weights' products on their own; remove megatron.transformer.fp8 or lora.rank"
        )
    return fields | {"tp_only_amax_red": True}

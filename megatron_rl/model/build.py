"""GPTModel from a Hugging Face config: shapes from the config, parallelism from the topology, the rest from the user.

Fields of Megatron-Core's TransformerConfig that the token-sum seam owns, or that the Hugging Face config settles, are
refused.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megatron_rl.algorithm.signal import UNCOUNTED_FIELDS
from megatron_rl.config import Config, LoraConfig
from megatron_rl.config.megatron_fields import resolve_fields
from megatron_rl.distributed.platform import HOST
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import ConfigError
from megatron_rl.model.head import hand_out_hidden, put_value_head
from megatron_rl.model.layer_spec import block_spec, choose_layer_spec
from megatron_rl.model.rotary import PackedRotary
from megatron_rl.weights.mapping import hf_size, pair_entries, target_entries

from megatron.core.enums import ModelType  # isort: skip
from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.tensor_parallel import layers as tensor_parallel  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

FAMILIES = ("qwen2", "qwen3", "llama", "mistral", "mixtral", "qwen3_moe")
MIXTURES = ("mixtral", "qwen3_moe")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_GEMMA = "the embedding times sqrt(hidden_size), norms that multiply by 1 + weight, a gelu (tanh) MLP"
_SANDWICH = "norms behind attention and behind the MLP (post_attention_layernorm, post_feedforward_layernorm)"
# What a layer of Megatron-Core 0.16.1 and 0.19.2 (read: transformer_config.py, transformer_layer.py,
# dot_product_attention.py) or
# the model built here has no place for; models as in transformers 5.19.
MISSING = {
    "gemma": _GEMMA,
    "gemma2": "soft-capped attention scores (attn_logit_softcapping) and logits (final_logit_softcapping), "
    f"{_SANDWICH}, a sliding window in every second layer, {_GEMMA}",
    "gemma3_text": f"{_SANDWICH}, two rotary bases and a sliding window by the layer's kind, {_GEMMA}",
    "gemma3": "a vision tower, and what gemma3_text misses",
    "qwen2_moe": "a shared expert with a gate of its own beside the routed experts",
    "deepseek_v3": "multi-latent attention, shared experts, a sigmoid router with groups and a correction bias",
    "gpt_oss": "attention sinks, clamped gated activations, biases on projections and experts",
    "phi3": "q, k, v in one tensor and gate, up in one, where the tables of weights/mapping.py name each",
}

_SEAM = "the token-sum seam owns it: the loss is a sum, nothing divides and backend/schedule.py reduces once"
_SHAPE = "it comes from the Hugging Face config in model.hf_path"
_SECTION = "it is set by {}"
_FIELDS = {field.name for field in dataclasses.fields(TransformerConfig)}
REFUSED_TRANSFORMER_FIELDS = {
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
    },  # 0.16.1 and 0.19.2 do not have the same ones
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the rest of the house asks of the Hugging Face config. Sizes in elements, ``context_tokens`` in tokens.

    ffn_hidden_size: the width of the MLP; of one expert, where there are experts.
    num_experts, experts_per_token: 0 for a dense model.
    router_pre_softmax: True where the chosen experts' weights are a share of all experts' probability and do not add up
    to 1.
    padded_vocab_size: the vocabulary rounded up to a multiple of TP; the pads take no probability and get no gradient.
    layer_spec: "transformer_engine" (norms fused into linears) or "torch"; it decides the parameters' names.
    value_head: one number per token in place of the vocabulary's; embeddings are never tied then.
    lora_rank, lora_alpha, lora_targets: of its adapters (model/adapter.py); 0 and none where every weight is trained.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int
    context_tokens: int
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    num_experts: int
    experts_per_token: int
    router_pre_softmax: bool
    layer_spec: str
    value_head: bool = False
    lora_rank: int = 0
    lora_alpha: float = 0.0
    lora_targets: tuple[str, ...] = ()

    @property
    def layer_parameters(self) -> int:
        """Weights of the matrices of one layer that a token passes: of a mixture's experts ``experts_per_token``."""
        attention = 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim
        mlps = self.experts_per_token if self.num_experts else 1
        return attention + 3 * self.hidden_size * self.ffn_hidden_size * mlps + self.hidden_size * self.num_experts

    @property
    def square_share(self) -> float:
        """Attention's cost of one squared token of a causal sequence, over a token's cost in the matrices of its
        layer."""
        return self.num_heads * self.head_dim / self.layer_parameters

    @property
    def head_layers(self) -> float:
        """The LM head's cost in layers, were every token to pass it."""
        return self.vocab_size * self.hidden_size / self.layer_parameters

    @property
    def adapter_parameters(self) -> int:
        """Numbers of one layer's adapters; 0 where every weight is trained."""
        entries = [pair for weight in target_entries(self) for pair in pair_entries(weight)]
        return sum(math.prod(hf_size(self, entry.hf[0])) for entry in entries)

    def with_adapters(self, lora: LoraConfig) -> ModelShape:
        """The same model with ``lora``'s adapters; itself where ``lora.rank`` is null."""
        if lora.rank is None:
            return self
        return dataclasses.replace(self, lora_rank=lora.rank, lora_alpha=lora.alpha, lora_targets=tuple(lora.targets))

    def flops_per_token(self, mean_context: float) -> float:
        """Forward and backward FLOPs of one token (6 per parameter it passes, 4 per frozen one, plus attention over
        ``mean_context``)."""
        linear = self.num_layers * self.layer_parameters + self.vocab_size * self.hidden_size
        linear = 4.0 / 6.0 * linear + self.num_layers * self.adapter_parameters if self.lora_rank else linear
        return 6.0 * linear + 12.0 * self.num_layers * self.num_heads * self.head_dim * mean_context


def _check_expressible(hf_config: Any) -> None:
    """ConfigError where a family's config asks for what the model built here would not do."""
    family = hf_config.model_type
    if family not in FAMILIES:
        missing = f"; missing for {family}: {MISSING[family]}" if family in MISSING else ""
        raise ConfigError(f"model.hf_path holds a {family!r} model; this version builds {', '.join(FAMILIES)}{missing}")
    if hf_config.hidden_act != "silu":
        raise ConfigError(f"hidden_act={hf_config.hidden_act!r} of {family} is not supported; only silu is")
    if family == "llama" and (hf_config.attention_bias or hf_config.mlp_bias):
        raise ConfigError(
            "a llama model with attention_bias or mlp_bias is not supported: its output projections carry biases too"
        )
    if family in ("qwen3", "qwen3_moe") and hf_config.attention_bias:
        raise ConfigError(
            f"a {family} model with attention_bias is not supported: its output projection carries a bias too"
        )
    if family.startswith("qwen") and hf_config.use_sliding_window:
        raise ConfigError(f"use_sliding_window=true of {family} is not supported; only full attention is")
    if (
        family == "mistral"
        and hf_config.sliding_window is not None
        and hf_config.sliding_window < hf_config.max_position_embeddings
    ):
        raise ConfigError(
            f"sliding_window={hf_config.sliding_window} of mistral is below "
            f"max_position_embeddings={hf_config.max_position_embeddings}, and only full attention is supported; "
            "within the window the two are equal, so lower max_position_embeddings to it in config.json if no "
            "sequence is longer"
        )
    if family == "mixtral" and hf_config.sliding_window is not None:
        raise ConfigError(
            f"sliding_window={hf_config.sliding_window} of mixtral is not supported; only full attention (null) is"
        )
    if family == "mixtral" and hf_config.router_jitter_noise:
        raise ConfigError(
            f"router_jitter_noise={hf_config.router_jitter_noise} of mixtral is not supported: it draws noise per "
            "batch; set it to 0.0"
        )
    if family == "qwen3_moe" and (hf_config.decoder_sparse_step != 1 or hf_config.mlp_only_layers):
        raise ConfigError(
            f"decoder_sparse_step={hf_config.decoder_sparse_step} and mlp_only_layers={hf_config.mlp_only_layers} of "
            "qwen3_moe leave dense layers between the mixtures, which is not supported; only decoder_sparse_step=1 "
            "and mlp_only_layers=[] are"
        )


def _check_divisible(hf_config: Any, ffn: int, ffn_name: str, config: Config, topology: Topology) -> None:
    """ConfigError where a degree of parallelism does not divide what it splits."""
    name, experts = hf_config.name_or_path or hf_config.model_type, hf_config.model_type in MIXTURES
    split = [
        ("parallel.tensor", topology.tensor_size, x, hf_config.to_dict()[x])
        for x in ("num_attention_heads", "num_key_value_heads")
    ]
    if experts:
        split += [
            ("parallel.expert_tensor", topology.expert_tensor_size, ffn_name, ffn),
            ("parallel.expert", topology.expert_size, "num_experts", hf_config.num_local_experts),
        ]
    else:
        split += [("parallel.tensor", topology.tensor_size, ffn_name, ffn)]
    stages = topology.pipeline_size * topology.virtual_size
    split += [
        ("parallel.pipeline x parallel.virtual_pipeline", stages, "num_hidden_layers", hf_config.num_hidden_layers)
    ]
    for key, degree, what, count in split:
        if count % degree:
            raise ConfigError(f"{key}={degree} does not divide {what}={count} of {name}; use a divisor")
    if not experts and topology.expert_size > 1:
        raise ConfigError(
            f"parallel.expert={topology.expert_size} splits experts and {name} has none; set parallel.expert=1"
        )
    if not experts and config.parallel.expert_tensor not in (None, topology.tensor_size):
        raise ConfigError(
            f"parallel.expert_tensor={config.parallel.expert_tensor} splits experts and {name} has none; leave it null"
        )
    if experts and topology.tensor_size > 1 and not config.parallel.sequence_parallel:
        raise ConfigError(
            f"parallel.tensor={topology.tensor_size} with experts needs parallel.sequence_parallel=true, or "
            "Megatron-Core would send each token to the experts once per tensor rank; turn it on"
        )


def model_shape(hf_config: Any, config: Config, topology: Topology, *, layer_spec: str) -> ModelShape:
    """Reads a Hugging Face config (see FAMILIES); ConfigError names what cannot be expressed or divided.

    A mixture's own ``router_aux_loss_coef`` is not read: that loss is no part of the token sum (algorithm/signal.py),
    and in transformers too it is added only where ``output_router_logits`` asks for it.
    """
    shape = read_shape(hf_config, layer_spec=layer_spec, vocab_multiple=topology.tensor_size)
    _check_divisible(hf_config, shape.ffn_hidden_size, _ffn_name(shape.family), config, topology)
    return shape


def _ffn_name(family: str) -> str:
    """The config's field for the width of the MLP, or of one expert."""
    return "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"


def read_shape(hf_config: Any, *, layer_spec: str, vocab_multiple: int = 1) -> ModelShape:
    """The shape whatever the topology; ConfigError names what Megatron-Core, or the model built here, cannot express.

    vocab_multiple: the padded vocabulary is the next multiple of it.
    """
    _check_expressible(hf_config)
    family, heads, vocab = hf_config.model_type, hf_config.num_attention_heads, hf_config.vocab_size
    mixture = family in MIXTURES
    head_dim = (
        hf_config.to_dict().get("head_dim") or hf_config.hidden_size // heads
    )  # absent in qwen2's config, None in some llamas'
    return ModelShape(
        family=family,
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=hf_config.to_dict()[_ffn_name(family)],
        num_heads=heads,
        num_kv_heads=hf_config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        padded_vocab_size=-(-vocab // vocab_multiple) * vocab_multiple,
        context_tokens=hf_config.max_position_embeddings,
        tied_embeddings=bool(hf_config.tie_word_embeddings),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        num_experts=hf_config.num_local_experts if mixture else 0,
        experts_per_token=hf_config.num_experts_per_tok if mixture else 0,
        router_pre_softmax=family == "qwen3_moe" and not hf_config.norm_topk_prob,
        layer_spec=layer_spec,
    )


def inverse_frequencies(hf_config: Any, head_dim: int) -> torch.Tensor:
    """Rotary inverse frequencies [head_dim / 2], float32, as transformers computes them (default, linear, llama3
    scaling)."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = hf_config.rope_parameters
    kind = rope["rope_type"]
    if kind == "default":
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if kind not in ("linear", "llama3"):
        raise ConfigError(
            f"rope_type={kind!r} is not supported (default, linear and llama3 are): it depends on the length or "
            "scales attention"
        )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    if factor != 1.0:
        raise ConfigError(f"rope_type={kind!r} with attention factor {factor} is not supported; only 1.0 is")
    return frequencies.float()


def transformer_config(shape: ModelShape, hf_config: Any, config: Config, topology: Topology) -> TransformerConfig:
    """Megatron-Core's TransformerConfig: the seam's fields, the model's, then ``megatron.transformer``'s."""
    given = resolve_fields(
        config.megatron.transformer, TransformerConfig, "megatron.transformer", REFUSED_TRANSFORMER_FIELDS
    )
    # 0, false and null say that there is none of it (algorithm/signal.py refuses the rest); Megatron-Core says so by
    # its default alone
    given = {name: value for name, value in given.items() if name not in UNCOUNTED_FIELDS or value}
    for name in ("attention_dropout", "hidden_dropout"):
        if given.get(name, 0.0) != 0.0 and not HOST.is_cuda:
            raise ConfigError(
                f"megatron.transformer.{name}={given[name]} needs CUDA generators; set it to 0 on a host with no GPU"
            )
    dtype = DTYPES[config.model.dtype]
    fields: dict[str, Any] = dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        kv_channels=shape.head_dim,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        tensor_model_parallel_size=topology.tensor_size,
        pipeline_model_parallel_size=topology.pipeline_size,
        expert_model_parallel_size=topology.expert_size,
        expert_tensor_parallel_size=topology.expert_tensor_size,
        context_parallel_size=topology.context_size,
        sequence_parallel=config.parallel.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=not HOST.is_cuda,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # variable lengths insist on it, for dense models too (0.16.1)
        virtual_pipeline_model_parallel_size=topology.virtual_size if topology.virtual_size > 1 else None,
        # interleaved at PP=2, batched p2p lets shapes arrive crossed (0.16.1)
        overlap_p2p_comm=topology.virtual_size > 1,
        batch_p2p_comm=topology.virtual_size == 1,
        **_mixture_fields(shape),
    )
    fields.update(given)
    try:
        return TransformerConfig(**fields)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"Megatron-Core's TransformerConfig refuses megatron.transformer={given}: {error}") from error


def _mixture_fields(shape: ModelShape) -> dict[str, Any]:
    """TransformerConfig's fields of a mixture of experts; none for a dense model."""
    if not shape.num_experts:
        return {}
    return dict(
        num_moe_experts=shape.num_experts,
        moe_ffn_hidden_size=shape.ffn_hidden_size,
        moe_router_topk=shape.experts_per_token,
        moe_router_score_function="softmax",
        moe_router_pre_softmax=shape.router_pre_softmax,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_z_loss_coeff=None,
        moe_grouped_gemm=shape.layer_spec == "transformer_engine",
    )


def build_model(
    config: Config, hf_config: Any, topology: Topology, *, value_head: bool = False
) -> tuple[list[GPTModel], ModelShape]:
    """This rank's chunks of the model (one, or ``parallel.virtual_pipeline`` under the interleaved schedule).

    Weights are not yet loaded: they hold no meaning until weights/export loads them.
    """
    kind = choose_layer_spec(config.model.layer_spec, config.model.dtype)
    stages = topology.pipeline_size * topology.virtual_size
    shape = model_shape(hf_config, config, topology, layer_spec=kind)
    if value_head:
        shape = dataclasses.replace(shape, value_head=True, tied_embeddings=False)
    transformer = transformer_config(shape, hf_config, config, topology)
    spec = block_spec(transformer, kind, shape.num_layers // stages)
    frequencies = inverse_frequencies(hf_config, shape.head_dim).to(HOST.device)
    chunks = []
    for chunk in range(topology.virtual_size):
        model = GPTModel(
            transformer,
            spec,
            vocab_size=shape.padded_vocab_size,
            max_sequence_length=shape.context_tokens,
            pre_process=topology.is_first_stage and chunk == 0,
            post_process=topology.is_last_stage and chunk == topology.virtual_size - 1,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="rope",
            vp_stage=chunk if topology.virtual_size > 1 else None,
        )
        model.model_type = ModelType.encoder_or_decoder
        if kind == "torch":
            model.rotary_pos_emb = PackedRotary(frequencies)
        else:
            model.rotary_pos_emb.inv_freq = frequencies  # Megatron hard-codes llama3's four constants
        if model.post_process:
            (put_value_head if value_head else hand_out_hidden)(model)
        _mark_tensor_parallel(model)
        if shape.num_experts and topology.expert_tensor_size != topology.tensor_size:
            _mark_experts(model)
        chunks.append(model.to(HOST.device))
    return chunks, shape


def _mark_tensor_parallel(model: GPTModel) -> None:
    """Megatron-Core (0.16.1 ``tensor_parallel/layers.py``) marks a weight as split inside its initialisation, which we
    skip. Without the mark the gradient norm counts tensor rank 0's shards alone, and clipping scales by a wrong
    norm."""
    dimensions = {
        tensor_parallel.ColumnParallelLinear: 0,
        tensor_parallel.VocabParallelEmbedding: 0,
        tensor_parallel.RowParallelLinear: 1,
    }
    for module in model.modules():
        for (
            kind,
            dimension,
        ) in dimensions.items():  # a tied output layer on the embedding's stage has no weight of its own
            if (
                isinstance(module, kind)
                and module.weight is not None
                and not hasattr(module.weight, "tensor_model_parallel")
            ):
                tensor_parallel.set_tensor_model_parallel_attributes(module.weight, True, dimension, 1)


def _mark_experts(model: GPTModel) -> None:
    """Has the experts' gradients reduced over the ranks that hold the same expert, not over the dense weights'
    data-parallel ranks.

    Megatron-Core 0.16.1 (``tensor_parallel/layers.py``) marks them so only under expert parallelism: with experts on
    one expert-parallel rank, split over fewer tensor ranks than the rest, each copy would keep the gradient of its own
    tokens. 0.19.2 does what is done here.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False

"""GPTModel from a Hugging Face config: shapes from the config, parallelism from the topology, the rest from the user.

The user may not set every field of Megatron-Core's TransformerConfig. Refused are the fields on
which the token-sum loss (a sum over tokens that nothing divides) depends, and the fields that the
Hugging Face config decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from megatron_rl.algorithm.sharing import shares_prompts
from megatron_rl.distributed.platform import HOST
from megatron_rl.distributed.requirements import compiler_fault
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import ConfigError
from megatron_rl.model.head import hand_out_hidden, put_value_head
from megatron_rl.model.hf_config import angle_kinds, model_shape, softmax_scale
from megatron_rl.model.layer_spec import settle_expert_biases
from megatron_rl.model.logprob.chunks import check_kernel
from megatron_rl.model.parts import parts_of
from megatron_rl.model.positions import angles_of, half_on_gpu
from megatron_rl.model.rotary import Angles
from megatron_rl.model.seam_fields import seam_fields, users_fields
from megatron_rl.model.settings import ModelSettings
from megatron_rl.model.transformer_fields import build_config, require_installed
from megatron_rl.model.weight_gradients import accumulate_weight_gradients, fuse_weight_gradients
from megatron_rl.weights.families.register import FAMILIES
from megatron_rl.weights.model_shape import ModelShape

from megatron.core.enums import ModelType  # isort: skip
from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.tensor_parallel import layers as tensor_parallel  # isort: skip
from megatron.core.transformer.moe.router import TopKRouter  # isort: skip
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # isort: skip
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # isort: skip


def transformer_config(
    shape: ModelShape, hf_config: Any, settings: ModelSettings, topology: Topology
) -> TransformerConfig:
    """Return Megatron-Core's TransformerConfig of a model that this package describes (``model.provider=native``).

    Its fields follow from the model's shape, the topology and the loss, a sum over tokens, which
    Megatron-Core is set not to divide. The user's ``megatron.transformer`` gives the rest.

    Raises ConfigError for a user's field that is refused.
    """
    # the user's fields
    extra = users_fields(settings.megatron.transformer, lora_rank=settings.lora.rank)
    if shape.router_bias and "moe_router_enable_expert_bias" in settings.megatron.transformer:
        raise ConfigError(
            f"megatron.transformer.moe_router_enable_expert_bias is settled for {shape.family}: its checkpoint holds "
            "the bias, which is used as it is; remove the setting"
        )
    shares = shape.layer_spec == "transformer_engine" and shares_prompts(
        settings.plan, settings.parallel, settings.megatron, shape.layer_spec
    )
    # the model's sizes, the seam's fields, windows and fused functions
    fields: dict[str, Any] = dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.dense_ffn_hidden_size or shape.ffn_hidden_size,
        kv_channels=shape.head_dim,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=parts_of(settings).activation(shape),
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        attention_output_gate=shape.output_gate,
        linear_attention_freq=_mixers(shape, extra),
        layernorm_zero_centered_gamma=shape.shifted_norms and shape.layer_spec == "transformer_engine",
        softmax_scale=_scale(shape, hf_config),
        **seam_fields(
            shape,
            topology,
            dtype=settings.model.dtype,
            sequence_parallel=settings.parallel.sequence_parallel,
            deterministic=settings.deterministic,
        ),
        **_window_fields(shape, topology),
        **_fusions(shape, extra, half=half_on_gpu(settings.model.dtype), shares=shares),
    )
    # the family's own fields
    fields |= FAMILIES[shape.family].layer_fields(shape)
    if shape.kv_lora_rank:
        from megatron_rl.model.latent_attention import latent_fields

        fields |= latent_fields(shape, hf_config, extra)
    return _build_config(fields, extra, shape)


def _mixers(shape: ModelShape, extra: dict[str, Any]) -> list[int] | None:
    """Return 1 for each layer with a gated delta net and 0 for the others; None if every layer has attention.

    Of this list Megatron-Core reads only that there is one: layers that differ get keys of their own
    in checkpoints (0.16.1 ``transformer_block.py`` sharded_state_dict).

    extra: the user's fields.

    Raises ConfigError for FP8 with gated delta nets.
    """
    if shape.delta and extra.get("fp8"):
        raise ConfigError(
            f"megatron.transformer.fp8={extra['fp8']} of {shape.family}: FP8 was not run with gated delta nets, whose "
            f"projection of {shape.delta.projected_width} rows has two numbers per head, and FP8's products take "
            "multiples of 16 rows on each tensor rank alone; remove megatron.transformer.fp8"
        )
    return [int(shape.has_delta_net(layer)) for layer in range(shape.num_layers)] if shape.delta else None


def _scale(shape: ModelShape, hf_config: Any) -> float | None:
    """Return the factor on attention scores for all layers; None for Megatron-Core's default, 1 / sqrt(head_dim).

    It is also None in two cases in which the factor is set elsewhere: for latent attention, and if
    full and sliding layers have rotary parameters of their own.
    """
    if shape.kv_lora_rank or None not in angle_kinds(hf_config):
        return None
    return softmax_scale(hf_config, shape.head_dim)


def _window_fields(shape: ModelShape, topology: Topology) -> dict[str, Any]:
    """Return {field: value} of TransformerConfig that gives each layer its sliding window; {} without windows.

    ``attention/packed.py`` and Transformer Engine read these fields. Raises ConfigError for windows
    under Transformer Engine's context parallelism, which does not support them.
    """
    if not any(shape.windows):
        return {}
    if shape.layer_spec == "transformer_engine" and topology.context_size > 1:
        raise ConfigError(
            f"parallel.context={topology.context_size} with a sliding window of {max(shape.windows)} tokens is "
            "computed by torch's layers alone (Transformer Engine's ring has no window); set model.layer_spec=torch or "
            "parallel.context=1"
        )
    (window,) = {x for x in shape.windows if x}
    return dict(window_size=(window - 1, 0), window_attn_skip_freq=[int(x > 0) for x in shape.windows])


def _build_config(fields: dict[str, Any], extra: dict[str, Any], shape: ModelShape) -> TransformerConfig:
    """Build the TransformerConfig; raise ConfigError if Megatron-Core refuses its fields.

    fields: the fields that the model needs.
    extra: the user's fields.

    ``moe_router_pre_softmax`` is set after Megatron-Core's check of the fields. For one expert per
    token the check refuses False, since the router would have no gradient (0.16.1
    ``transformer_config.py:1641``). Some checkpoints need False: transformers divides the chosen
    expert's probability by itself, so its weight is 1.
    """
    cls = MLATransformerConfig if shape.kv_lora_rank else TransformerConfig
    transformer = build_config(cls, fields, extra, shape.family)
    transformer.moe_router_pre_softmax = shape.router_pre_softmax
    return transformer


def _fusions(shape: ModelShape, extra: dict[str, Any], *, half: bool, shares: bool) -> dict[str, bool]:
    """Return {field: whether it is on} for the fields of TransformerConfig that choose fused kernels.

    extra: the user's fields.
    half: whether torch's layers may use fused kernels: in bfloat16 on a GPU.
    shares: whether Transformer Engine's layers may get samples that share one copy of their prompt.

    The reasons for the values:

    - Rotary angles: over packed sequences Megatron-Core's plain code asks the device for the
      lengths four times in every layer (0.16.1 and 0.19.2
      ``models/common/embeddings/rope_utils.py``). The fused kernel does not, and rounds neither cos
      nor sin. If samples may share prompts, model/attention/transformer_engine.py applies that
      kernel instead.
    - SwiGLU: compiled by torch, it keeps only its input for backward. Megatron-Core refuses it
      beside Transformer Engine's own activation.
    - Weight gradients: model/weight_gradients.py fuses them; Megatron-Core's field needs Apex.

    docs/evidence/status.md says why the other fields are off.
    """
    engine, plain = shape.layer_spec == "transformer_engine", not (shape.gelu or shape.swiglu_limit)
    compiles = engine or (half and plain and not compiler_fault())
    return dict(
        apply_rope_fusion=engine and not shares,
        bias_activation_fusion=compiles and not extra.get("use_te_activation_func"),
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )


def settled_shape(
    settings: ModelSettings, hf_config: Any, topology: Topology, *, value_head: bool = False
) -> ModelShape:
    """Return the shape that ``build_model``'s model would have, without building it.

    Raises ConfigError for settings, or a Hugging Face config, with which no model can be built.
    """
    check_kernel(settings.model.logprob_kernel)
    parts = parts_of(settings)
    layer_spec = parts.layer_spec
    require_installed(settings.megatron.transformer, settings.model, layer_spec)
    shape = model_shape(hf_config, settings, topology, layer_spec=layer_spec, value_head=value_head)
    parts.require_shown(shape)
    return shape


class Provider(Protocol):
    """Makes a model's TransformerConfig and its chunks; the setting ``model.provider`` chooses the implementation."""

    transformer_config: Callable[[ModelShape, Any, ModelSettings, Topology], TransformerConfig]
    """Called with (shape, Hugging Face config, settings, topology); returns the TransformerConfig of a model."""

    def chunk(
        self,
        transformer: TransformerConfig,
        spec: TransformerBlockSubmodules,
        shape: ModelShape,
        *,
        first: bool,
        last: bool,
        number: int | None,
    ) -> GPTModel:
        """Build and return one chunk of a pipeline stage.

        spec: the spec of the chunk's layers.
        first: whether the chunk holds the embedding.
        last: whether the chunk holds the output layer.
        number: the chunk's number on its stage under the interleaved schedule, else None.
        """

    def check_angles(self, model: GPTModel, angles: Angles) -> None:
        """Raise ConfigError if the rotary frequencies of the built model are not ``angles``."""


class NativeProvider:
    """Makes models of the families in weights/families/ (``model.provider=native``)."""

    transformer_config = staticmethod(transformer_config)

    def chunk(
        self,
        transformer: TransformerConfig,
        spec: TransformerBlockSubmodules,
        shape: ModelShape,
        *,
        first: bool,
        last: bool,
        number: int | None,
    ) -> GPTModel:
        return GPTModel(
            transformer,
            spec,
            vocab_size=shape.padded_vocab_size,
            max_sequence_length=shape.context_tokens,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="rope",
            vp_stage=number,
        )

    def check_angles(self, model: GPTModel, angles: Angles) -> None:
        pass


def provider_of(name: str) -> Provider:
    """Return the provider that ``model.provider`` names ("native" or "bridge")."""
    match name:
        case "bridge":
            from megatron_rl.model.bridge.build import BridgeProvider

            return BridgeProvider()
        case _:
            return NativeProvider()


def build_model(
    settings: ModelSettings, hf_config: Any, topology: Topology, *, value_head: bool = False
) -> tuple[list[GPTModel], ModelShape]:
    """Build this rank's chunks of the model and return them with the model's shape.

    There is one chunk, or ``parallel.virtual_pipeline`` chunks under the interleaved schedule. The
    weights are not loaded here; weights/export.py loads them.

    value_head: whether the model has a value head in place of the LM head, as a critic has.
    """
    # Values that all chunks share.
    shape = settled_shape(settings, hf_config, topology, value_head=value_head)
    provider, parts = provider_of(settings.model.provider), parts_of(settings)
    transformer = provider.transformer_config(shape, hf_config, settings, topology)
    shares = shares_prompts(settings.plan, settings.parallel, settings.megatron, shape.layer_spec)
    angles = angles_of(hf_config, shape)
    extra = settings.megatron.transformer
    # One GPTModel per chunk, then its rotary angles, head and marks.
    chunks = []
    for chunk in range(topology.virtual_size):
        layers = shape.layers_on(chunk * topology.pipeline_size + topology.pipeline_rank)
        spec = parts.block_spec(transformer, shape, layers, angles, shares=shares)
        model = _make_chunk(provider, transformer, shape, spec, topology, chunk, extra)
        provider.check_angles(model, angles)
        parts.give_inputs(model, shape, hf_config, angles, shares=shares)
        if model.post_process:
            (put_value_head if value_head else hand_out_hidden)(model)
        _mark_tensor_parallel(model)
        if shape.num_experts and topology.expert_tensor_size != topology.tensor_size:
            _mark_experts(model)
        if "gradient_accumulation_fusion" not in extra and not extra.get("fp8"):
            if shape.layer_spec == "transformer_engine":
                fuse_weight_gradients(model)
            elif half_on_gpu(settings.model.dtype):
                accumulate_weight_gradients(model)
        chunks.append(model.to(HOST.device))
    _freeze_router_bias(transformer, chunks)
    return chunks, shape


def _make_chunk(
    provider: Provider,
    transformer: TransformerConfig,
    shape: ModelShape,
    spec: TransformerBlockSubmodules,
    topology: Topology,
    chunk: int,
    extra: Mapping[str, Any],
) -> GPTModel:
    """Build and return chunk number ``chunk`` of this rank.

    spec: the spec of the chunk's layers.
    extra: the user's ``megatron.transformer`` fields.

    Raises ConfigError if Megatron-Core's layers refuse the user's fields.
    """
    first = topology.is_first_stage and chunk == 0
    last = topology.is_last_stage and chunk == topology.virtual_size - 1
    number = chunk if topology.virtual_size > 1 else None
    try:
        model = provider.chunk(transformer, spec, shape, first=first, last=last, number=number)
    except (AssertionError, AttributeError, ImportError, OSError, TypeError, ValueError) as error:
        if not extra or isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"Megatron-Core builds no {shape.family} model under megatron.transformer={dict(extra)}: "
            f"{type(error).__name__}: {error}; remove the field that it names"
        ) from error
    model.model_type = ModelType.encoder_or_decoder
    return model


def _freeze_router_bias(transformer: TransformerConfig, chunks: list[GPTModel]) -> None:
    """Keep the routers' correction bias at the checkpoint's values; the routers still choose experts by it.

    With ``moe_router_enable_expert_bias`` the routers count a step's tokens, and Megatron-Core's
    ``finalize_model_grads`` moves the bias by the counts (0.16.1 ``moe/router.py``,
    ``distributed/finalize_model_grads.py``). Dropped samples, fillers (samples without a loss) and
    shared prompts would change the counts. The rollout engine would not get the new bias either. So
    this function switches the field off, after the chunks are built.
    """
    transformer.moe_router_enable_expert_bias = False
    for module in (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)):
        module.enable_expert_bias = False


def _mark_tensor_parallel(model: GPTModel) -> None:
    """Set Megatron-Core's attribute ``tensor_model_parallel`` on the weights that are split over tensor ranks.

    Megatron-Core (0.16.1 ``tensor_parallel/layers.py``) sets it in its initialisation of weights,
    which is skipped here. Without it the gradient norm would count tensor rank 0's shards alone,
    and clipping would scale by a wrong norm.
    """
    dimensions = {
        tensor_parallel.ColumnParallelLinear: 0,
        tensor_parallel.VocabParallelEmbedding: 0,
        tensor_parallel.RowParallelLinear: 1,
    }
    for module in model.modules():
        for kind, dimension in dimensions.items():
            # on the embedding's stage a tied output layer has weight None
            if (
                isinstance(module, kind)
                and module.weight is not None
                and not hasattr(module.weight, "tensor_model_parallel")
            ):
                tensor_parallel.set_tensor_model_parallel_attributes(module.weight, True, dimension, 1)
    settle_expert_biases(model)


def _mark_experts(model: GPTModel) -> None:
    """Set ``allreduce=False`` on experts' parameters, so that gradients are reduced over the ranks of the same expert.

    Without this attribute a gradient is reduced over the data-parallel ranks. Megatron-Core 0.16.1
    (``tensor_parallel/layers.py``) sets it only under expert parallelism. Without expert
    parallelism, experts may still be split over fewer tensor ranks than the dense weights. Then
    several tensor ranks hold the same expert, and each copy would keep the gradient of its own
    tokens. 0.19.2 sets the attribute itself.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False

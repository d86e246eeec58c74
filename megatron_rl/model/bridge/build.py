"""Models built by Megatron-Bridge's provider, their layers changed to take packed sequences and shared prompts.

The provider builds Megatron-Core's GPTModel and adds its family's changes (Gemma scales its
embeddings). This module sets the parallel sizes, the layers' spec, and the fields that the token-sum
loss (a sum over tokens that nothing divides) needs. The spec is one of two: Transformer Engine's
layer, or Megatron-Core's plain layer with the attention of model/attention/packed.py and torch's
norms.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron_rl.algorithm.sharing import shares_prompts
from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import ConfigError
from megatron_rl.model.bridge.family import read_provider
from megatron_rl.model.layer_spec import RMSNorm
from megatron_rl.model.post_norm import ShiftedRMSNorm
from megatron_rl.model.rotary import Angles
from megatron_rl.model.seam_fields import seam_fields, users_fields
from megatron_rl.model.settings import ModelSettings
from megatron_rl.model.transformer_fields import overruled
from megatron_rl.weights.model_shape import ModelShape

from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.process_groups_config import ProcessGroupCollection  # isort: skip
from megatron.core.transformer.enums import AttnBackend  # isort: skip
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip


class LayerNorm(torch.nn.LayerNorm):
    """Computes torch's layer norm in float32, and casts it back to the input's dtype.

    Under ``layernorm_zero_centered_gamma`` it multiplies by 1 + weight instead of the weight.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.origin = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.float() + self.origin
        return F.layer_norm(x.float(), self.normalized_shape, weight, self.bias.float(), self.eps).to(x.dtype)


def norm_of(config: TransformerConfig) -> type[torch.nn.Module]:
    """Return the norm class that a provider's config asks for, for layers made of torch's modules.

    The config's fields ``normalization`` and ``layernorm_zero_centered_gamma`` decide. Transformer
    Engine's layers bring norms of their own.
    """
    if config.normalization == "LayerNorm":
        return LayerNorm
    return ShiftedRMSNorm if config.layernorm_zero_centered_gamma else RMSNorm


def bridged_config(shape: ModelShape, hf_config: Any, settings: ModelSettings, topology: Topology) -> TransformerConfig:
    """Return Megatron-Bridge's provider of a model, which is a TransformerConfig, with all fields set.

    Two kinds of the provider's fields are overwritten: those that the topology and the loss need, and
    those that the user sets in ``megatron.transformer``. The loss is a sum over tokens, which
    Megatron-Core must not divide.

    Raises ConfigError if Megatron-Core refuses the fields.
    """
    provider, _ = read_provider(hf_config)
    extra = users_fields(settings.megatron.transformer, lora_rank=settings.lora.rank)
    engine = shape.layer_spec == "transformer_engine"
    fields = dict(
        vocab_size=shape.padded_vocab_size,
        should_pad_vocab=False,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        seq_length=shape.context_tokens,
        fp16=False,
        autocast_dtype=None,
        apply_rope_fusion=engine
        and not shares_prompts(settings.plan, settings.parallel, settings.megatron, shape.layer_spec),
        bias_activation_fusion=engine and provider.activation_func is F.silu,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=False,
        **seam_fields(
            shape,
            topology,
            dtype=settings.model.dtype,
            sequence_parallel=settings.parallel.sequence_parallel,
            deterministic=settings.deterministic,
        ),
    )
    if not engine:
        fields["attention_backend"] = AttnBackend.auto  # sets environment variables that torch's attention ignores
    for name, value in overruled(fields, extra, shape.family).items():
        setattr(provider, name, value)
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    try:
        provider.finalize()
    except (ValueError, AssertionError) as error:
        raise ConfigError(
            f"megatron-bridge's {type(provider).__name__} refuses megatron.transformer={extra}: {error}; remove the "
            "field that it names"
        ) from error
    return provider


def put_norms(spec: TransformerBlockSubmodules, config: TransformerConfig, layer_spec: str) -> None:
    """Put the norm class that ``config`` asks for (``norm_of``) into the spec of a chunk's layers, in place.

    layer_spec: "torch", or "transformer_engine", whose spec stays as it is: its modules read the
        config themselves.
    """
    if layer_spec != "torch":
        return
    norm = norm_of(config)
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = norm
        if config.qk_layernorm:
            attention = parts.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = norm
    spec.layer_norm = norm


def check_frequencies(model: GPTModel, frequencies: torch.Tensor) -> None:
    """Raise ConfigError if a built model's rotary frequencies differ from transformers' ``frequencies``."""
    theirs = model.rotary_pos_emb.inv_freq.to(frequencies)
    if theirs.shape != frequencies.shape or not torch.allclose(theirs, frequencies, rtol=1e-5, atol=0.0):
        raise ConfigError(
            "model.provider=bridge: megatron-bridge's rotary frequencies differ from rope_parameters in "
            "config.json, so the model would not be the model of its files"
        )


class BridgeProvider:
    """Builds models by Megatron-Bridge; implements ``Provider`` of model/build.py."""

    transformer_config = staticmethod(bridged_config)

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
        """Return one chunk of a pipeline stage, built by ``transformer``, which is Megatron-Bridge's provider.

        spec: the spec of the chunk's layers, whose norms ``put_norms`` replaces.
        first, last, number: as in ``Provider.chunk`` of model/build.py.

        Raises ConfigError if the provider builds no GPTModel.
        """
        put_norms(spec, transformer, shape.layer_spec)
        transformer.transformer_layer_spec = lambda _: spec
        model = transformer.provide(pre_process=first, post_process=last, vp_stage=number)
        if not isinstance(model, GPTModel):
            raise ConfigError(
                f"model.provider=bridge: {type(transformer).__name__} built a {type(model).__name__}, and the token "
                "sum is built for Megatron-Core's GPTModel alone"
            )
        return model

    def check_angles(self, model: GPTModel, angles: Angles) -> None:
        check_frequencies(model, angles.tables[None])

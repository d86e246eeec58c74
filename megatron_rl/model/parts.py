"""The parts of a model's layers: plain parts here, row-invariant parts under ``rollout.bitwise``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, assert_never

import torch
import torch.nn.functional as F

from megatron_rl.config.model import ModelConfig
from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)
from megatron_rl.model.layer_spec import block_spec, choose_layer_spec
from megatron_rl.model.logprob.chunks import AskedKernel
from megatron_rl.model.positions import give_inputs, half_on_gpu, turning_attention
from megatron_rl.model.rotary import Angles
from megatron_rl.model.settings import ModelSettings
from megatron_rl.weights.model_shape import ModelShape

from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip


class Parts(Protocol):
    """Gives the modules and functions of which a model is built."""

    @property
    def layer_spec(self) -> str:
        """Return "transformer_engine" or "torch"; raise ConfigError if the wanted layers cannot be built."""

    @property
    def logprob_kernel(self) -> AskedKernel:
        """Return the name of the kernel that computes on the model's logits (logprob/chunks.py)."""

    def require_shown(self, shape: ModelShape) -> None:
        """Raise ConfigError if the parts were not tested with this model, or on such a host."""

    def activation(self, shape: ModelShape) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the gate's activation."""

    def block_spec(
        self,
        transformer: TransformerConfig,
        shape: ModelShape,
        layers: Sequence[int],
        angles: Angles,
        *,
        shares: bool,
    ) -> TransformerBlockSubmodules:
        """Return the submodules of a stage's block of ``layers``. shares: whether prompts may be shared."""

    def give_inputs(self, model: GPTModel, shape: ModelShape, hf_config: Any, angles: Angles, *, shares: bool) -> None:
        """Give a chunk its rotary angles, and its embedding the factor that some families have."""


def parts_of(settings: ModelSettings) -> Parts:
    """Return the parts of a run's models."""
    match settings.bitwise:
        case True:
            from megatron_rl.model.invariant.parts import InvariantParts

            return InvariantParts()
        case False:
            may_turn = "apply_rope_fusion" not in settings.megatron.transformer
            return PlainParts(model=settings.model, may_turn=may_turn)
        case other:
            assert_never(other)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainParts:
    """Gives torch's and Transformer Engine's parts, and the parts that some families add.

    may_turn: whether a core attention may apply the rotary angles itself.
    """

    model: ModelConfig
    may_turn: bool

    @property
    def layer_spec(self) -> str:
        return choose_layer_spec(self.model.layer_spec, self.model.dtype)

    @property
    def logprob_kernel(self) -> AskedKernel:
        return self.model.logprob_kernel

    def require_shown(self, shape: ModelShape) -> None:
        pass

    def activation(self, shape: ModelShape) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return gelu (Gemma), ``quick_gelu`` (gpt-oss, whose gate and up are bounded), else SiLU."""
        if shape.gelu:
            return partial(F.gelu, approximate="tanh")
        if shape.swiglu_limit:
            from megatron_rl.model.gpt_oss import quick_gelu

            return quick_gelu
        return F.silu

    def block_spec(
        self,
        transformer: TransformerConfig,
        shape: ModelShape,
        layers: Sequence[int],
        angles: Angles,
        *,
        shares: bool,
    ) -> TransformerBlockSubmodules:
        """Return the submodules of a stage's block, changed as the model's family needs."""
        spec = block_spec(transformer, shape.layer_spec, layers, share_prompts=shares)
        if shape.sinks:
            from megatron_rl.model.gpt_oss import put_gpt_oss_layers

            put_gpt_oss_layers(spec, shape.layer_spec)
        if shape.post_norms:
            from megatron_rl.model.post_norm import put_norms_behind

            put_norms_behind(spec, shape.layer_spec)
        if shape.sandwich_norms:
            from megatron_rl.model.post_norm import put_norms_around

            put_norms_around(spec, shape.layer_spec)
        if shape.chunked is not None:
            from megatron_rl.model.attention.chunked import put_chunked_attention

            put_chunked_attention(spec, shape, angles.tables.get(None))
        if shape.kv_lora_rank:
            from megatron_rl.model.latent_attention import put_latent_attention

            put_latent_attention(spec, shape.layer_spec)
        return spec

    def give_inputs(self, model: GPTModel, shape: ModelShape, hf_config: Any, angles: Angles, *, shares: bool) -> None:
        """Give a chunk its rotary angles and its embedding its factor (model/positions.py ``give_inputs``)."""
        packed = shape.layer_spec == "torch" or shares
        half = half_on_gpu(self.model.dtype)
        turning = turning_attention(shape, half=half, shares=shares) if self.may_turn else None
        give_inputs(model, angles, hf_config, shape, packed=packed, turning=turning)

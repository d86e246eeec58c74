"""The choice of the modules and functions of a model's layers: plain ones, or row-invariant ones.

Row-invariant ones are taken under ``rollout.bitwise`` (model/invariant/parts.py). They give a row
(a token) the same bits whatever other rows are computed with it.
"""

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
    """Gives the modules and functions of which a model is built; ``parts_of`` chooses the implementation."""

    @property
    def layer_spec(self) -> str:
        """Return "transformer_engine" or "torch", whose modules the layers are made of.

        Raises ConfigError if the setting demands modules that cannot be built here.
        """

    @property
    def logprob_kernel(self) -> AskedKernel:
        """Return the name of the kernel that computes log-probs from logits (logprob/chunks.py)."""

    def require_shown(self, shape: ModelShape) -> None:
        """Raise ConfigError unless these modules were tested with such a model, and on such a host (CPU or GPU)."""

    def activation(self, shape: ModelShape) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the activation function of the MLP's gate, which takes and returns a tensor."""

    def block_spec(
        self,
        transformer: TransformerConfig,
        shape: ModelShape,
        layers: Sequence[int],
        angles: Angles,
        *,
        shares: bool,
    ) -> TransformerBlockSubmodules:
        """Return the spec of a pipeline stage's block of layers.

        layers: the layers' numbers in the whole model, from 0.
        angles: the model's rotary frequencies.
        shares: whether samples may share one copy of their prompt.
        """

    def give_inputs(self, model: GPTModel, shape: ModelShape, hf_config: Any, angles: Angles, *, shares: bool) -> None:
        """Set up a chunk's rotary embedding, and the factor by which some families multiply the embeddings.

        model: one chunk of this rank's model; it is changed.
        angles: the model's rotary frequencies.
        shares: whether samples may share one copy of their prompt.
        """


def parts_of(settings: ModelSettings) -> Parts:
    """Return the row-invariant ``Parts`` if ``rollout.bitwise`` is true, else the plain ones.

    With row-invariant modules a row's (a token's) result has the same bits in any batch.
    """
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
    """Chooses a model's modules: those of torch's or Transformer Engine's layers, and those that its family needs.

    model: the settings ``model.*``.
    may_turn: whether the core attention may apply the rotary angles itself. It may not if the user
        sets ``apply_rope_fusion``.
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
        """Return gelu (tanh form) for Gemma, ``quick_gelu`` for gpt-oss, and SiLU for other families."""
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
        """Return the spec of a pipeline stage's layers, changed as the model's family needs.

        A family may need other norms, attention sinks, attention within chunks, or latent
        attention. ``Parts.block_spec`` describes the arguments.
        """
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
        if shape.shifted_norms:
            from megatron_rl.model.post_norm import put_shifted_norms

            put_shifted_norms(spec, shape.layer_spec)
        if shape.output_gate:
            from megatron_rl.model.delta_net.place import put_delta_nets

            put_delta_nets(spec, shape, layers, self.model.delta_kernel)
        if shape.chunked is not None:
            from megatron_rl.model.attention.chunked import put_chunked_attention

            put_chunked_attention(spec, shape, angles.tables.get(None))
        if shape.kv_lora_rank:
            from megatron_rl.model.latent_attention import put_latent_attention

            put_latent_attention(spec, shape.layer_spec)
        return spec

    def give_inputs(self, model: GPTModel, shape: ModelShape, hf_config: Any, angles: Angles, *, shares: bool) -> None:
        """Set up a chunk's rotary embedding, and the factor by which some families multiply the embeddings.

        ``Parts.give_inputs`` describes the arguments.
        """
        packed = shape.layer_spec == "torch" or shares
        half = half_on_gpu(self.model.dtype)
        turning = turning_attention(shape, half=half, shares=shares) if self.may_turn else None
        give_inputs(model, angles, hf_config, shape, packed=packed, turning=turning)

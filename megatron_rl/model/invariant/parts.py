"""The choice of row-invariant layers under ``rollout.bitwise``, for the models and hosts that were tested.

Row-invariant: a row's (a token's) result has the same bits whatever other rows are computed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_rl.distributed.platform import HOST
from megatron_rl.errors import ConfigError
from megatron_rl.model.invariant.layers import give_angles, invariant_block_spec
from megatron_rl.model.invariant.operations import silu
from megatron_rl.model.rotary import Angles
from megatron_rl.weights.families.register import FAMILIES
from megatron_rl.weights.model_shape import ModelShape

from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip


class InvariantParts:
    """Gives modules with which a row's (a token's) result has the same bits in any batch.

    It implements ``Parts`` of model/parts.py.
    """

    layer_spec = "torch"
    logprob_kernel = "invariant"

    def require_shown(self, shape: ModelShape) -> None:
        require_shown(shape)

    def activation(self, shape: ModelShape) -> Callable[[torch.Tensor], torch.Tensor]:
        return silu

    def block_spec(
        self,
        transformer: TransformerConfig,
        shape: ModelShape,
        layers: Sequence[int],
        angles: Angles,
        *,
        shares: bool,
    ) -> TransformerBlockSubmodules:
        return invariant_block_spec(transformer, len(layers))

    def give_inputs(self, model: GPTModel, shape: ModelShape, hf_config: Any, angles: Angles, *, shares: bool) -> None:
        give_angles(model, angles.tables[None])


def require_shown(shape: ModelShape) -> None:
    """Raise ConfigError if ``rollout.bitwise`` was not tested with this model, or if this host has a GPU."""
    if shape.num_experts:
        raise ConfigError(
            f"rollout.bitwise=true is for dense models, and this one mixes {shape.num_experts} experts, whose "
            "router and whose sum over experts are not row-invariant; set rollout.bitwise=false"
        )
    if not FAMILIES[shape.family].bitwise:
        shown = ", ".join(sorted(name for name, family in FAMILIES.items() if family.bitwise))
        raise ConfigError(
            f"rollout.bitwise=true was tested with {shown}, and this model's model_type is "
            f"{shape.family}, whose layers may have other operations; set rollout.bitwise=false"
        )
    if any(shape.windows):
        raise ConfigError(
            f"rollout.bitwise=true is for attention over all tokens, and this {shape.family} model has a sliding "
            f"window of {max(shape.windows)} tokens; set rollout.bitwise=false"
        )
    if HOST.is_cuda:
        raise ConfigError(
            "rollout.bitwise=true was tested on CPUs alone; set rollout.bitwise=false on a GPU (docs/bitwise.md says "
            "what vLLM has there)"
        )

"""Gives a model its rotary angles, by the way that its layers and this host have, and its embedding's factor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_rl.config import Config
from megatron_rl.distributed.platform import HOST
from megatron_rl.model.attention import TorchAttention
from megatron_rl.model.embedding import scale_embedding
from megatron_rl.model.hf_config import angle_kinds, latent_angles, rotary_tables, softmax_scale
from megatron_rl.model.latent_attention import give_latent_rotary
from megatron_rl.model.rotary import PackedRotary, give_angles_by_kind, turn_in_attention
from megatron_rl.weights.families.register import FAMILIES
from megatron_rl.weights.model_shape import ModelShape

from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip


def half_on_gpu(config: Config) -> bool:
    """Return whether torch's layers take fused kernels: in bfloat16 on a GPU. In float32 they are the reference."""
    return HOST.is_cuda and config.model.dtype == "bfloat16"


def angles_of(hf_config: Any, shape: ModelShape) -> tuple[dict[str | None, torch.Tensor], float]:
    """Return ``rotary_tables`` on this device, and the factor on cos and sin that only latent attention has."""
    if shape.kv_lora_rank:
        frequencies, factor = latent_angles(hf_config, shape)
        return {None: frequencies.to(HOST.device)}, factor
    tables = rotary_tables(hf_config, shape.head_dim, turns_partly=FAMILIES[shape.family].turns_partly)
    return {kind: table.to(HOST.device) for kind, table in tables.items()}, 1.0


def turning_attention(config: Config, shape: ModelShape, *, shares: bool) -> type[torch.nn.Module] | None:
    """Return the core attention that applies the rotary angles itself; None where Megatron-Core does."""
    if shape.layer_spec == "transformer_engine":
        if not shares:
            return None
        from megatron_rl.model.engine_attention import SharedPromptAttention

        return SharedPromptAttention
    return TorchAttention if half_on_gpu(config) and shape.chunked is None else None


def give_inputs(
    model: GPTModel,
    tables: Mapping[str | None, torch.Tensor],
    factor: float,
    hf_config: Any,
    shape: ModelShape,
    *,
    packed: bool,
    turning: type[torch.nn.Module] | None,
) -> None:
    """Give a model its rotary angles, and a first stage's embedding its factor.

    packed: the angles are by the positions that come with the tokens, as latent attention's are.
    turning: the core attention that applies these itself; None where Megatron-Core does.
    """
    if shape.scaled_embedding and model.pre_process:
        scale_embedding(model, model.config.params_dtype)
    if shape.kv_lora_rank:
        give_latent_rotary(model, tables[None], factor)
    elif None not in tables:
        scales = {kind: softmax_scale(hf_config, model.config.kv_channels, kind) for kind in tables}
        give_angles_by_kind(model, angle_kinds(hf_config), tables, scales)
    elif turning is not None:
        turn_in_attention(model, tables[None], turning)
    elif packed:
        model.rotary_pos_emb = PackedRotary(tables[None])
    else:
        model.rotary_pos_emb.inv_freq = tables[None]  # Megatron hard-codes llama3's four constants

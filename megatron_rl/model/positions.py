"""The set-up of a model's rotary angles, and of the factor by which some families multiply the embeddings."""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.distributed.platform import HOST
from megatron_rl.model.attention.packed import TorchAttention
from megatron_rl.model.hf_config import angle_kinds, latent_angles, rotary_tables, softmax_scale
from megatron_rl.model.rotary import Angles, PackedRotary, give_angles_by_kind, turn_in_attention
from megatron_rl.weights.families.register import FAMILIES
from megatron_rl.weights.model_shape import ModelShape

from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip


def half_on_gpu(dtype: str) -> bool:
    """Return whether torch's layers use fused kernels: True for bfloat16 on a GPU.

    In float32 torch's layers are the reference, and compute without fused kernels.
    """
    return HOST.is_cuda and dtype == "bfloat16"


def angles_of(hf_config: Any, shape: ModelShape) -> Angles:
    """Return the rotary inverse frequencies, on this device, of the model that a Hugging Face config describes."""
    if shape.kv_lora_rank:
        frequencies, factor = latent_angles(hf_config, shape)
        return Angles(tables={None: frequencies.to(HOST.device)}, factor=factor)
    tables = rotary_tables(hf_config, shape.head_dim, turns_partly=FAMILIES[shape.family].turns_partly)
    return Angles(tables={kind: table.to(HOST.device) for kind, table in tables.items()}, factor=1.0)


def turning_attention(shape: ModelShape, *, half: bool, shares: bool) -> type[torch.nn.Module] | None:
    """Return the class of core attention that is to apply the rotary angles; None if Megatron-Core applies them.

    half: whether the model is bfloat16 on a GPU. If not, torch's layers are the reference: they use
        no fused kernels, and Megatron-Core applies the angles.
    shares: whether samples may share one copy of their prompt.
    """
    if shape.layer_spec == "transformer_engine":
        if not shares:
            return None
        from megatron_rl.model.attention.transformer_engine import SharedPromptAttention

        return SharedPromptAttention
    return TorchAttention if half and shape.chunked is None else None


def give_inputs(
    model: GPTModel,
    angles: Angles,
    hf_config: Any,
    shape: ModelShape,
    *,
    packed: bool,
    turning: type[torch.nn.Module] | None,
) -> None:
    """Set up a chunk's rotary embedding, and on the first pipeline stage the factor that multiplies embeddings (Gemma).

    angles: the model's rotary frequencies.
    packed: whether a module of this package computes each token's angles from the token's own
        position; otherwise Megatron-Core's table gives them. Such a module is used in any case with
        latent attention, or if each kind of layer has its own angles.
    turning: the core attention class that rotates queries and keys itself; None: Megatron-Core
        rotates them.
    """
    if shape.scaled_embedding and model.pre_process:
        scale_embedding(model, model.config.params_dtype)
    tables = angles.tables
    if shape.kv_lora_rank:
        from megatron_rl.model.latent_attention import give_latent_rotary

        give_latent_rotary(model, tables[None], angles.factor)
    elif None not in tables:
        scales = {kind: softmax_scale(hf_config, model.config.kv_channels, kind) for kind in tables}
        give_angles_by_kind(model, angle_kinds(hf_config), tables, scales)
    elif turning is not None:
        turn_in_attention(model, tables[None], turning)
    elif packed:
        model.rotary_pos_emb = PackedRotary(tables[None])
    else:
        model.rotary_pos_emb.inv_freq = tables[None]  # Megatron-Core's own would have fixed llama3 constants


def scale_embedding(model: GPTModel, dtype: torch.dtype) -> None:
    """Make the first pipeline stage multiply its embeddings [T, 1, H] by sqrt(H), rounded to ``dtype``.

    transformers does the same.

    dtype: the weights' dtype.

    The weight, which a tied head shares, is not changed.
    """
    factor = float(torch.tensor(model.config.hidden_size**0.5, dtype=dtype))
    model.embedding.register_forward_hook(lambda module, given, embedded: embedded * factor)

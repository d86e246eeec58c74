"""Rotary angles of packed tokens, one row each, in place of Megatron-Core's table of positions.

Megatron-Core (read, 0.16.1 and 0.19.2 ``models/common/embeddings/rope_utils.py``) cuts its table
anew for every sequence, twice in every layer, and asks the device for the lengths to do so. Without
bounds it multiplies by the angles that it gets: [T, 1, d] beside q [T, h, d].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatron_rl.model.attention.apply_rotary import token_angles
from megatron_rl.model.attention.packed import PackedSequences

from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Angles:
    """Holds a model's rotary inverse frequencies, float32 [d / 2] on this device, and the factor on cos and sin.

    tables: by the kinds of the layers (hf_config.py ``angle_kinds``); under None alone where all
        layers share.
    factor: 1.0 but for latent attention's.
    """

    tables: Mapping[str | None, torch.Tensor]
    factor: float


class NoRotary(torch.nn.Module):
    """Replaces GPTModel's RotaryEmbedding where the core attention applies the angles."""

    def get_rotary_seq_len(self, *_) -> int:
        return 0

    def forward(self, *_, **__) -> None:
        return None


class PackedRotary(torch.nn.Module):
    """Replaces GPTModel's RotaryEmbedding, and is called in the same two steps.

    inv_freq: [d / 2] float32, not a parameter.
    """

    def __init__(self, inv_freq: torch.Tensor):
        super().__init__()
        self.inv_freq = inv_freq

    def get_rotary_seq_len(
        self, inference_context, transformer, transformer_input, transformer_config, packed: PackedSequences
    ):
        """Return the tokens' positions for ``forward``, where Megatron-Core's own method returns a length."""
        return packed.position_ids

    def forward(self, position_ids: torch.Tensor, *_, **__) -> torch.Tensor:
        """Return [T, 1, d], the angles of tokens at ``position_ids`` [T], the two halves alike."""
        angles = token_angles(position_ids, self.inv_freq)
        return torch.cat([angles, angles], dim=-1)[:, None]


class RotaryByKind(PackedRotary):
    """Gives the angles of layers of several kinds, of which each layer takes its own.

    inv_freq: [kinds, d / 2] float32.
    """

    def forward(self, position_ids: torch.Tensor, *_, **__) -> torch.Tensor:
        """Return [kinds, T, 1, d], the angles of tokens at ``position_ids`` [T], the two halves alike."""
        angles = position_ids.to(self.inv_freq.dtype)[:, None] * self.inv_freq[:, None]
        return torch.cat([angles, angles], dim=-1)[:, :, None]


def _take_angles(number: int, module: torch.nn.Module, given: tuple, named: dict) -> tuple[tuple, dict]:
    return given, named | {"rotary_pos_emb": named["rotary_pos_emb"][number]}


def give_angles_by_kind(
    model: GPTModel,
    kinds: Sequence[str],
    tables: Mapping[str, torch.Tensor],
    scales: Mapping[str, float | None],
) -> None:
    """Give each layer the rotary angles and the scale of the scores of its kind.

    kinds: of each layer over all pipeline stages. tables: inverse frequencies [d / 2]. scales: None
        for 1 / sqrt(d).

    Megatron-Core hands one tensor of angles to all layers (0.16.1 and 0.19.2
    ``transformer_block.py``), to attention by name.
    """
    names = list(tables)
    model.rotary_pos_emb = RotaryByKind(torch.stack([tables[name] for name in names]))
    for layer in model.decoder.layers:
        kind = kinds[layer.layer_number - 1]
        layer.self_attention.core_attention.softmax_scale = scales[kind]
        layer.self_attention.register_forward_pre_hook(partial(_take_angles, names.index(kind)), with_kwargs=True)


def turn_in_attention(model: GPTModel, inv_freq: torch.Tensor, kind: type[torch.nn.Module]) -> None:
    """Have a model's attentions of this kind apply the rotary angles, in place of Megatron-Core; inv_freq: [d2 / 2]."""
    model.rotary_pos_emb = NoRotary()
    for module in model.modules():
        if isinstance(module, kind):
            module.inv_freq = inv_freq

"""Rotary angles of packed tokens: one row of angles for each token, instead of Megatron-Core's table by position.

Megatron-Core (0.16.1 and 0.19.2 ``models/common/embeddings/rope_utils.py``) slices its table for
every sequence, twice in every layer, and asks the device for the lengths. Here its PackedSeqParams
hold no sequence bounds (cu_seqlens). So Megatron-Core applies the given angles as they are, row by
row: [T, 1, d] to q [T, h, d].
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
    """Holds a model's rotary inverse frequencies and the factor on cos and sin.

    tables: {kind of layer: inverse frequencies, float32 [d / 2] on this device}. The kinds are those
        of hf_config.py ``angle_kinds``; the only key is None if all layers share the frequencies.
    factor: 1.0 except for latent attention.
    """

    tables: Mapping[str | None, torch.Tensor]
    factor: float


class NoRotary(torch.nn.Module):
    """Replaces GPTModel's RotaryEmbedding by a module that returns None.

    It is for models whose core attentions apply the rotary angles themselves.
    """

    def get_rotary_seq_len(self, *_) -> int:
        return 0

    def forward(self, *_, **__) -> None:
        return None


class PackedRotary(torch.nn.Module):
    """Replaces GPTModel's RotaryEmbedding by a module that computes the angles of the tokens' own positions.

    GPTModel calls the two methods below, which RotaryEmbedding has as well.

    inv_freq: [d / 2] float32, the inverse frequencies, not a parameter.
    """

    def __init__(self, inv_freq: torch.Tensor):
        super().__init__()
        self.inv_freq = inv_freq

    def get_rotary_seq_len(
        self, inference_context, transformer, transformer_input, transformer_config, packed: PackedSequences
    ):
        """Return the tokens' positions, which GPTModel passes to ``forward``.

        Megatron-Core's method of this name returns a length.
        """
        return packed.position_ids

    def forward(self, position_ids: torch.Tensor, *_, **__) -> torch.Tensor:
        """Return [T, 1, d], the angles of tokens at ``position_ids`` [T]; both halves of d are the same."""
        angles = token_angles(position_ids, self.inv_freq)
        return torch.cat([angles, angles], dim=-1)[:, None]


class RotaryByKind(PackedRotary):
    """Computes the rotary angles of each kind of layer (full or sliding attention).

    ``give_angles_by_kind`` gives each layer the angles of its kind.

    inv_freq: [kinds, d / 2] float32, the inverse frequencies.
    """

    def forward(self, position_ids: torch.Tensor, *_, **__) -> torch.Tensor:
        """Return [kinds, T, 1, d]: for each kind of layer, the angles of tokens at ``position_ids`` [T].

        Both halves of d are the same.
        """
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
    """Give each layer the rotary angles and the scale of attention scores of its kind.

    kinds: each layer's kind, over all pipeline stages (hf_config.py ``angle_kinds``).
    tables: each kind's inverse frequencies [d / 2].
    scales: each kind's scale of attention scores; None for 1 / sqrt(d).

    Megatron-Core passes one tensor of angles to all layers, and to attention as the keyword
    ``rotary_pos_emb`` (0.16.1 and 0.19.2 ``transformer_block.py``). So a hook on each attention
    picks the angles of the layer's kind.
    """
    names = list(tables)
    model.rotary_pos_emb = RotaryByKind(torch.stack([tables[name] for name in names]))
    for layer in model.decoder.layers:
        kind = kinds[layer.layer_number - 1]
        layer.self_attention.core_attention.softmax_scale = scales[kind]
        layer.self_attention.register_forward_pre_hook(partial(_take_angles, names.index(kind)), with_kwargs=True)


def turn_in_attention(model: GPTModel, inv_freq: torch.Tensor, kind: type[torch.nn.Module]) -> None:
    """Make a model's core attentions of class ``kind`` apply the rotary angles, and Megatron-Core apply none.

    inv_freq: float32 [d2 / 2], the inverse frequencies of the d2 rotated columns of a head.
    """
    model.rotary_pos_emb = NoRotary()
    for module in model.modules():
        if isinstance(module, kind):
            module.inv_freq = inv_freq

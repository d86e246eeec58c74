"""Rotary angles of packed tokens, one row each, in place of Megatron-Core's table of positions.

Megatron-Core (read, 0.16.1 and 0.19.2 ``models/common/embeddings/rope_utils.py``) cuts its table anew for every
sequence, twice in every layer, and asks the device for the lengths to do so. Without bounds it multiplies by the angles
that it gets: [T, 1, d] beside q [T, h, d].
"""

from __future__ import annotations

import torch

from megatron_rl.model.attention import PackedSequences


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
        angles = torch.outer(position_ids.to(self.inv_freq.dtype), self.inv_freq)
        return torch.cat([angles, angles], dim=-1)[:, None]

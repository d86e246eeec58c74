"""Transformer Engine's attention for samples that share one copy of their prompt.

A prompt's queries see the prompt's keys. A response's queries see the prompt's keys and then the
response's. So the keys are gathered: each response gets a copy of the prompt's keys. A response's
last query and the last of its gathered keys are the same token, so the causal mask is aligned bottom
right. FlashAttention and FusedAttention both take ``padding_causal_bottom_right``, with separate
sequence bounds (cu_seqlens) for queries and for keys (read in Transformer Engine 2.3 and 2.18,
pytorch/attention/dot_product_attention/utils.py ``get_attention_backend``). This module needs
Transformer Engine.

The rotary angles are applied here too, by the fused kernel. Over packed sequences (``thd``) the
kernel counts positions from each sequence's begin, but a response's positions continue from its
prompt. Over one sequence (``sbhd``) it takes a row of angles for each token. So the whole
micro-batch is passed as one sequence (read in 2.3 and 2.20, pytorch/attention/rope.py, and run on
an H100 in 2.20).
"""

from __future__ import annotations

import torch

from megatron_rl.model.attention.apply_rotary import token_angles
from megatron_rl.model.attention.packed import PackedSequences

from megatron.core.extensions.transformer_engine import TEDotProductAttention, fused_apply_rotary_pos_emb  # isort: skip

MASK = "padding_causal_bottom_right"


class SharedPromptAttention(TEDotProductAttention):
    """Computes causal attention over packed input: q [T, h, d], k and v [T, g, d] → [T, h·d].

    It replaces Megatron-Core's TEDotProductAttention if samples may share one copy of their prompt,
    and takes that class's arguments.

    inv_freq: float32 [d2 / 2], the inverse frequencies by which it rotates the first d2 ≤ d columns
        of queries and keys. None if queries and keys come rotated already.
    """

    inv_freq: torch.Tensor | None = None

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None, **_
    ):
        if not isinstance(packed_seq_params, PackedSequences) or packed_seq_params.segments is None:
            raise TypeError("SharedPromptAttention takes PackedSequences with segments as packed_seq_params")
        if self.inv_freq is not None:
            angles = _angles(packed_seq_params, self.inv_freq)
            query, key = (self._turned(x, angles) for x in (query, key))
        segments = packed_seq_params.segments
        whole = super(TEDotProductAttention, self).forward  # Megatron-Core's forward does not know this mask

        def attention(keys, values):
            return whole(
                query,
                keys,
                values,
                None,
                qkv_format="thd",
                cu_seqlens_q=segments.query_bounds,
                cu_seqlens_kv=segments.key_bounds,
                max_seqlen_q=segments.longest_query,
                max_seqlen_kv=segments.longest_key,
                attn_mask_type=MASK,
            )

        return segments.attend(key, value, attention)

    def _turned(self, heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Return heads [T, n, d] rotated by float32 rotary angles [T, 1, 1, d2]; the result is rounded once."""
        return fused_apply_rotary_pos_emb(heads[:, None], angles, interleaved=self.config.rotary_interleaved)[:, 0]


def _angles(packed: PackedSequences, inv_freq: torch.Tensor) -> torch.Tensor:
    """Return float32 [T, 1, 1, d2], the tokens' rotary angles; the first layer computes them for all layers."""
    if packed.angles is None or packed.angles[0] is not inv_freq:
        angles = token_angles(packed.position_ids, inv_freq)
        packed.angles = inv_freq, (torch.cat([angles, angles], dim=-1)[:, None, None],)
    return packed.angles[1][0]

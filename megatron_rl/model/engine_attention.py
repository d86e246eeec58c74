"""Transformer Engine's attention over shared prompts: each segment's queries see gathered keys, aligned at their ends.

A prompt's queries see its own keys. A response's see the prompt's keys and then its own, so that its last query is its
last key's: the causal mask is aligned bottom right. Read in Transformer Engine 2.3 and 2.18 (pytorch/attention/
dot_product_attention/utils.py ``get_attention_backend``): FlashAttention and FusedAttention both take
``padding_causal_bottom_right``, with bounds of the queries that differ from those of the keys. This module is imported
where Transformer Engine is.
"""

from __future__ import annotations

from megatron_rl.model.attention import PackedSequences

from megatron.core.extensions.transformer_engine import TEDotProductAttention  # isort: skip

MASK = "padding_causal_bottom_right"


class SharedPromptAttention(TEDotProductAttention):
    """Computes causal attention over packed input: q [T, h, d], k and v [T, g, d] → [T, h·d].

    It stands in for Megatron-Core's TEDotProductAttention where prompts may be shared, and takes its arguments.
    """

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None, **_
    ):
        if not isinstance(packed_seq_params, PackedSequences) or packed_seq_params.segments is None:
            raise TypeError("SharedPromptAttention takes PackedSequences with segments as packed_seq_params")
        segments = packed_seq_params.segments
        whole = super(TEDotProductAttention, self).forward  # Megatron-Core's own knows no name of this mask

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

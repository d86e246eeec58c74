"""Attention of a few queries per row on a CPU, for transformers' models with fewer key heads than query heads.

Query heads that share a key head are queries of that one head. So one call of the kernel reads each key
once. transformers' own call (5.19, integrations/sdpa_attention.py) copies the keys to every query head if
there is a mask. And torch 2.13's CPU kernel computes a single bfloat16 query per head several times as
slowly as a few (docs/evidence/performance.md).
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "sdpa_grouped_queries"
FEW_QUERIES = 16  # of a row: decoded tokens and drafts, no prompts


def use_grouped_queries(model: PreTrainedModel) -> None:
    """Let a model whose attention is ``sdpa`` compute it by ``grouped_attention``; other models stay as they are."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(GROUPED)


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **settings: object,
) -> tuple[torch.Tensor, None]:
    """Return the attention output [B, Q, H, d], and None, as transformers' attention functions do.

    query: [B, H, Q, d].
    key, value: [B, G, K, d]; G divides H.
    attention_mask: bool or added to the scores, [B, 1, Q, K]; None: causal, and the last query sees all keys.
    settings: of transformers' ``sdpa_attention_forward``, which computes what is not grouped: many queries, or
        scores with a bias of their own.
    """
    batch, heads, queries, size = query.shape
    groups = key.shape[1]
    alike = attention_mask is None and queries == 1 or attention_mask is not None and attention_mask.shape[1] == 1
    if groups == heads or queries > FEW_QUERIES or not alike or settings.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **settings)
    if attention_mask is not None and queries > 1:
        attention_mask = attention_mask.repeat(1, 1, heads // groups, 1)
    out = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, groups, heads // groups * queries, size),
        key,
        value,
        attn_mask=attention_mask,
        scale=scaling,
    )
    return out.reshape(batch, heads, queries, -1).transpose(1, 2), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)

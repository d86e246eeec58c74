"""Packed sequences for Megatron-Core, and a core attention over torch's SDPA that takes them.

Megatron-Core's own ``DotProductAttention`` refuses packed (THD) input (read, 0.16.1 ``transformer/dot_product_attention.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron_rl import platform  # noqa: F401  (before megatron.core)

from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron-Core's packed-sequence parameters with the lengths on the host, so that attention asks the device nothing.

    lengths:  padded length of each sequence, in order; they sum to the micro-batch's tokens.
    buckets:  for each group of sequences of like length, int64 [B, L] token positions to gather; a pad repeats the
              sequence's own last position, and a causal query never sees what comes after it.
    scatter:  int64 [T], where each token's output stands in the concatenated bucket outputs.
    """

    lengths: tuple[int, ...] = ()
    buckets: tuple[torch.Tensor, ...] = ()
    scatter: torch.Tensor | None = None


def pack(lengths: tuple[int, ...], device: torch.device) -> PackedSequences:
    """Packed-sequence parameters for sequences laid one after the other.

    Example: lengths (2, 3) make cu_seqlens [0, 2, 5] and one bucket [[0, 1, 1], [2, 3, 4]].
    """
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    bounds[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    buckets, scatter = _buckets(lengths, bounds.tolist())
    longest = max(lengths)
    cu_seqlens = bounds.to(device, non_blocking=True)
    return PackedSequences(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest,
        lengths=lengths, buckets=tuple(x.to(device) for x in buckets), scatter=scatter.to(device),
    )  # fmt: skip


def _buckets(lengths: tuple[int, ...], starts: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Groups sequences so that a group's shortest is at least 3/4 of its longest: few SDPA calls, little padding."""
    by_length = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = []
    for i in by_length:
        if groups and lengths[i] * 4 >= lengths[groups[-1][0]] * 3:
            groups[-1].append(i)
        else:
            groups.append([i])
    buckets, scatter, offset = [], torch.empty(sum(lengths), dtype=torch.int64), 0
    for group in groups:
        width = lengths[group[0]]
        size = torch.tensor([lengths[i] for i in group])[:, None]
        start = torch.tensor([starts[i] for i in group])[:, None]
        column = torch.arange(width)[None]
        positions = start + torch.minimum(column, size - 1)
        inside = column < size
        scatter[positions[inside]] = offset + torch.arange(positions.numel()).view_as(positions)[inside]
        buckets.append(positions)
        offset += positions.numel()
    return buckets, scatter


class TorchAttention(torch.nn.Module):
    """Causal core attention over ``scaled_dot_product_attention`` for packed input: q [T, h, d], k and v [T, g, d] → [T, h·d].

    No token sees another sequence's. Takes the arguments with which Megatron-Core builds a core attention.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_):
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None, **_):
        if not isinstance(packed_seq_params, PackedSequences):
            raise TypeError(f"TorchAttention takes PackedSequences as packed_seq_params, not {type(packed_seq_params).__name__}")
        grouped = query.shape[1] != key.shape[1]
        outputs = []
        for positions in packed_seq_params.buckets:
            batch, width = positions.shape
            flat = positions.flatten()
            q, k, v = (x.index_select(0, flat).view(batch, width, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped)
            outputs.append(out.transpose(1, 2).reshape(batch * width, -1))
        packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return packed.index_select(0, packed_seq_params.scatter)

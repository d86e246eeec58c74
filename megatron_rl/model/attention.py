"""Packed sequences for Megatron-Core, and a core attention over torch's SDPA that takes them.

The sequences are whole or split over context-parallel ranks. Megatron-Core's own ``DotProductAttention`` refuses packed
(THD) input and leaves context parallelism to Transformer Engine (read, 0.16.1
``transformer/dot_product_attention.py``). Here queries stay on their rank and keys and values are gathered: each
sequence is cut in 2·CP chunks and rank r holds chunks r and 2·CP − 1 − r, so that causal work is the same on every rank
(Megatron-Core's THD rotary embedding cuts alike, ``models/common/embeddings/rope_utils.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_rl.distributed.platform import send

from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextShard:
    """Describes this rank among the context-parallel ranks that share each sequence.

    group: None where this rank holds the sequences whole.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


WHOLE = ContextShard()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """Holds queries of like length, from B sequences, and the keys that they may see.

    queries: int64 [B, Q] positions among this rank's tokens; a pad repeats its row's last.
    keys:    int64 [B, K] positions among all ranks' gathered tokens, None where they are the queries' own.
    mask:    bool [B, 1, Q, K], True where a query sees a key; None for the plain causal triangle of queries on
             themselves.
    """

    queries: torch.Tensor
    keys: torch.Tensor | None = None
    mask: torch.Tensor | None = None


@dataclass
class PackedSequences(PackedSeqParams):
    """Adds host-side lengths to Megatron-Core's packed-sequence parameters, so that attention asks the device nothing.

    lengths: padded tokens of each whole sequence, in order; they sum to the micro-batch's tokens over all context
             ranks.

    For ``TorchAttention``, and empty where Transformer Engine attends:
    position_ids: int64 [T], the position of each of this rank's tokens in its own sequence, for the rotary embedding.
    buckets: queries with the keys that they see, for few attention calls with little padding.
    scatter: int64 [T], the row of each of this rank's tokens in the concatenated bucket outputs.
    context: this rank among those that share the sequences.
    """

    lengths: tuple[int, ...] = ()
    position_ids: torch.Tensor | None = None
    buckets: tuple[Bucket, ...] = ()
    scatter: torch.Tensor | None = None
    context: ContextShard = WHOLE


def context_positions(lengths: tuple[int, ...], rank: int, size: int) -> np.ndarray:
    """Return int64 [T / size], the positions that a context rank holds of the micro-batch's T, in its own order.

    Rank r holds chunks r and 2·size − 1 − r of each sequence's 2·size chunks.

    Raises ValueError where a length does not split in 2·size chunks.

    Example: lengths (4, 8), size 2: rank 0 holds [0, 3, 4, 5, 10, 11], rank 1 holds [1, 2, 6, 7, 8, 9].
    """
    if size == 1:
        return np.arange(sum(lengths))
    parts, start = [], 0
    for length in lengths:
        if length % (2 * size):
            raise ValueError(
                f"a sequence of {length} tokens does not split in 2 x {size} chunks; pad it to a multiple of {2 * size}"
            )
        chunk = length // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            parts.append(start + np.arange(number * chunk, (number + 1) * chunk))
        start += length
    return np.concatenate(parts)


def pack(
    lengths: tuple[int, ...],
    device: torch.device,
    context: ContextShard = WHOLE,
    *,
    for_transformer_engine: bool = False,
) -> PackedSequences:
    """Return packed-sequence parameters for sequences laid one after the other.

    for_transformer_engine: gives the bounds (cu_seqlens) that its kernels read, in place of the buckets. With bounds
        Megatron-Core asks the device for the lengths, twice in every layer; without them it applies rotary angles token
        by token (model/rotary.py).

    Example: lengths (2, 3) make cu_seqlens [0, 2, 5], or one bucket [[0, 1, 1], [2, 3, 4]].
    """
    positions = np.concatenate([np.arange(n) for n in lengths])[context_positions(lengths, context.rank, context.size)]
    shared = dict(
        qkv_format="thd",
        lengths=lengths,
        position_ids=send(torch.from_numpy(positions), device),
        context=context,
    )
    if for_transformer_engine:
        return PackedSequences(**shared, **_bounds(lengths, device, context))
    buckets, scatter = (
        _whole_buckets(lengths) if context.size == 1 else _split_buckets(lengths, context.rank, context.size)
    )
    return PackedSequences(
        **shared, buckets=tuple(_on(bucket, device) for bucket in buckets), scatter=send(scatter, device)
    )


def _bounds(lengths: tuple[int, ...], device: torch.device, context: ContextShard) -> dict[str, object]:
    """Return the fields that Transformer Engine reads, of the whole sequences: int32 [S + 1] and the longest.

    Under context parallelism its FlashAttention asserts on the padded bounds, FusedAttention alone makes them itself
    (2.3 to 2.20, context_parallel.py and backends.py). No pad lies between sequences here, and the very same tensor
    says so without a question to the device.
    """
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    bounds[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    cu_seqlens = send(bounds, device)
    fields: dict[str, object] = dict(
        cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths)
    )
    if context.size > 1:
        fields |= dict(cu_seqlens_q_padded=cu_seqlens, cu_seqlens_kv_padded=cu_seqlens)
        if "pad_between_seqs" in PackedSeqParams.__dataclass_fields__:  # 0.19.2
            fields["pad_between_seqs"] = False
    return fields


def _on(bucket: Bucket, device: torch.device) -> Bucket:
    if device.type == "cpu":
        return bucket
    queries, keys, mask = (x if x is None else send(x, device) for x in (bucket.queries, bucket.keys, bucket.mask))
    return Bucket(queries=queries, keys=keys, mask=mask)


def _alike(lengths: tuple[int, ...]) -> list[list[int]]:
    """Group sequence numbers so that a group's shortest is at least 3/4 of its longest."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and lengths[i] * 4 >= lengths[groups[-1][0]] * 3:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _rows(starts: torch.Tensor, sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [B, widest] positions, ``sizes`` of them from ``starts`` on, and a bool [B, widest], False for a pad.

    A pad repeats its row's last position.
    """
    column = torch.arange(int(sizes.max()))[None]
    return starts[:, None] + torch.minimum(column, sizes[:, None] - 1), column < sizes[:, None]


def _whole_buckets(lengths: tuple[int, ...]) -> tuple[list[Bucket], torch.Tensor]:
    size = torch.tensor(lengths)
    start = size.cumsum(0) - size
    buckets, scatter, offset = [], torch.empty(sum(lengths), dtype=torch.int64), 0
    for group in _alike(lengths):
        positions, inside = _rows(start[group], size[group])
        scatter[positions[inside]] = offset + torch.arange(positions.numel()).view_as(positions)[inside]
        buckets.append(Bucket(queries=positions))
        offset += positions.numel()
    return buckets, scatter


def _split_buckets(lengths: tuple[int, ...], rank: int, ranks: int) -> tuple[list[Bucket], torch.Tensor]:
    """Return the buckets of this rank's two chunks of each sequence, and the scatter.

    A chunk's keys are its sequence up to the chunk's own end, whichever ranks hold them.
    """
    order = np.concatenate([context_positions(lengths, peer, ranks) for peer in range(ranks)])
    gathered_rows = torch.from_numpy(np.argsort(order))  # the row of each position among the gathered tokens
    size = torch.tensor(lengths)
    start, chunk = size.cumsum(0) - size, size // (2 * ranks)
    local_start = start // ranks
    buckets, scatter, offset = [], torch.empty(sum(lengths) // ranks, dtype=torch.int64), 0
    for group in _alike(lengths):
        for half, number in enumerate((rank, 2 * ranks - 1 - rank)):
            queries, inside = _rows(local_start[group] + half * chunk[group], chunk[group])
            keys, _ = _rows(start[group], (number + 1) * chunk[group])
            # a pad's query sees every key: its output is never read
            query_positions = number * chunk[group][:, None] + torch.arange(queries.shape[1])[None]
            mask = torch.arange(keys.shape[1])[None, None] <= query_positions[:, :, None]
            scatter[queries[inside]] = offset + torch.arange(queries.numel()).view_as(queries)[inside]
            buckets.append(Bucket(queries=queries, keys=gathered_rows[keys], mask=mask[:, None]))
            offset += queries.numel()
    return buckets, scatter


class _GatherContext(torch.autograd.Function):
    """Gathers [T, …] of each context rank to [CP·T, …], in rank order; backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.size = group, local.shape
        gathered = local.new_empty(group.size() * local.shape[0], *local.shape[1:])
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        local = gradient.new_empty(ctx.size)
        dist.reduce_scatter_tensor(local, gradient.contiguous(), group=ctx.group)
        return local, None


class TorchAttention(torch.nn.Module):
    """Computes causal attention over packed input: q [T, h, d], k and v [T, g, d] → [T, h·d].

    No token sees another sequence's tokens. Takes the arguments with which Megatron-Core builds a core attention.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_):
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None, **_
    ):
        if not isinstance(packed_seq_params, PackedSequences):
            raise TypeError(
                f"TorchAttention takes PackedSequences as packed_seq_params, not {type(packed_seq_params).__name__}"
            )
        if packed_seq_params.context.size > 1:
            key, value = _GatherContext.apply(torch.stack([key, value], dim=1), packed_seq_params.context.group).unbind(
                1
            )
        outputs = [self._attend(query, key, value, bucket) for bucket in packed_seq_params.buckets]
        packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return packed.index_select(0, packed_seq_params.scatter)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """Return [B·Q, h·d], the attention of one bucket's queries, pads included."""

        def rows(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return x.index_select(0, positions.flatten()).view(*positions.shape, *x.shape[1:]).transpose(1, 2)

        key_positions = bucket.queries if bucket.keys is None else bucket.keys
        out = F.scaled_dot_product_attention(
            rows(query, bucket.queries),
            rows(key, key_positions),
            rows(value, key_positions),
            attn_mask=bucket.mask,
            is_causal=bucket.mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2).reshape(bucket.queries.numel(), -1)

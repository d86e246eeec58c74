"""Attention that gives a query the same bits in a packed pass over whole sequences and in a step with a cache.

A query reads its keys in blocks of ``KEY_BLOCK`` positions, in order, from its sequence's first
position. It keeps a running maximum and sum (the online softmax of Milakov and Gimelshein, 2018,
arXiv:1805.02867). Every matrix product has the same shape: ``ITEMS`` groups of ``QUERIES`` queries,
each group with one block of keys. A group's queries are of one sequence; dummy queries fill it up. A
block that a query does not see multiplies the query's sums by exactly 1 and adds exactly 0.
Products are in float32. The flash kernel (model/attention/flash.py) computes the gradient, from the
output and log-sum-exps of this forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from megatron_rl.model.attention.flash import span_attention
from megatron_rl.model.attention.packed import PackedSequences, TorchAttention
from megatron_rl.model.invariant.operations import elementwise
from megatron_rl.model.invariant.visible_keys import ITEMS, KEY_BLOCK, QUERIES, Sight


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sight: Sight, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention [T, h, d] of queries [T, h, d] over keys and values [K, g, d], and log-sum-exps [h, T].

    sight: which keys each query sees.
    scale: multiplies the scores.

    No gradient passes through.
    """
    heads, groups, width = query.shape[1], key.shape[1], query.shape[2]
    out = torch.empty_like(query)
    lse = query.new_empty(heads, query.shape[0], dtype=torch.float32)
    for start in range(0, len(sight.queries), ITEMS):
        part = slice(start, start + ITEMS)
        rows, real, seen = sight.queries[part], sight.real[part], sight.seen[part]
        # [ITEMS · g, (h / g) · QUERIES, …]: a batched product per group of queries and key head, over its query heads
        q = _grouped(query.index_select(0, rows.flatten()).float().view(ITEMS, QUERIES, groups, -1, width))
        limit = seen[:, None, None].expand(ITEMS, groups, heads // groups, QUERIES).reshape(ITEMS * groups, -1, 1)
        found, found_lse = _one_product(q, limit, key, value, sight.key_rows(part), scale)
        found = found.view(ITEMS, heads, QUERIES, width).transpose(1, 2)
        out[rows[real]] = found[real].to(out.dtype)
        lse[:, rows[real]] = found_lse.view(ITEMS, heads, QUERIES).transpose(1, 2)[real].t()
    return out, lse


def _grouped(x: torch.Tensor) -> torch.Tensor:
    """Return queries as [ITEMS · g, (h / g) · QUERIES, d], for a batched product with the keys of each key head.

    x: [ITEMS, QUERIES, g, h / g, d]: ITEMS times QUERIES tokens, with h query heads that share g
        key heads.
    """
    return x.permute(0, 2, 3, 1, 4).reshape(x.shape[0] * x.shape[2], -1, x.shape[-1])


def _one_product(
    q: torch.Tensor, limit: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 outputs [ITEMS · g, M, d] and log-sum-exps [ITEMS · g, M] of queries q [ITEMS · g, M, d].

    q: ITEMS groups of QUERIES queries, from ``_grouped``; M is (h / g) · QUERIES for h query heads
        and g key heads.
    limit: int64 [ITEMS · g, M, 1]: a query sees the first so many of its group's ``keys``.
    key, value: [K, g, d], the whole tensors.
    keys: int64 [ITEMS, n], the rows of ``key`` and ``value`` that each group may see; n is a multiple
        of KEY_BLOCK.
    """
    groups = key.shape[1]
    highest = q.new_full(q.shape[:2], -torch.inf)
    total, result = torch.zeros_like(highest), torch.zeros_like(q)
    for block, rows in enumerate(keys.split(KEY_BLOCK, dim=1)):
        k, v = (
            x.index_select(0, rows.flatten()).float().view(ITEMS, KEY_BLOCK, groups, -1).transpose(1, 2).flatten(0, 1)
            for x in (key, value)
        )
        scores = torch.bmm(q, k.transpose(1, 2).contiguous()).mul_(scale)
        positions = torch.arange(block * KEY_BLOCK, (block + 1) * KEY_BLOCK)
        scores.masked_fill_(positions >= limit, -torch.inf)
        peak = torch.maximum(highest, scores.amax(-1))
        shares = elementwise(torch.exp, scores.sub_(peak[..., None]))
        kept = elementwise(torch.exp, highest - peak)
        total = total * kept + shares.sum(-1)
        result = result * kept[..., None] + torch.bmm(shares, v)
        highest = peak
    return result / total[..., None], highest + elementwise(torch.log, total)


@dataclass(kw_only=True)
class Cache:
    """Holds the keys and values of the sequences that are being sampled.

    num_rows: the number of rows of each tensor, one row per token.
    layers: layer number → (keys, values), each [num_rows, g, d].
    """

    num_rows: int
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def write(
        self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's keys and values [T, g, d] to the cache's rows ``rows`` [T].

        Returns all keys and values of the layer, each [num_rows, g, d].
        """
        if layer not in self.layers:  # zeros: rows that no query sees yet are multiplied by 0
            self.layers[layer] = (
                key.new_zeros(self.num_rows, *key.shape[1:]),
                value.new_zeros(self.num_rows, *value.shape[1:]),
            )
        held = self.layers[layer]
        for memory, new in zip(held, (key, value), strict=True):
            memory[rows] = new
        return held

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy the rows ``source`` [n] to the rows ``target`` [n] in the keys and values of every layer."""
        for held in self.layers.values():
            for memory in held:
                memory[torch.from_numpy(target)] = memory[torch.from_numpy(source)]


@dataclass(kw_only=True)
class CachedSequences(PackedSequences):
    """Describes the next tokens of sequences whose earlier tokens are in a cache.

    cache: the keys and values of the earlier tokens.
    rows: int64 [T], the cache's row of each token.
    reach: the keys that each token sees, as rows of the cache.
    """

    cache: Cache
    rows: torch.Tensor
    reach: Sight

    @classmethod
    def of(cls, cache: Cache, parts: Sequence[tuple[np.ndarray, int, np.ndarray]]) -> CachedSequences:
        """Return the ``CachedSequences`` of the next tokens of several sequences.

        parts: (rows, first, keys) for each sequence. ``rows``: its next tokens' rows of the query
            tensor. ``first``: the position of the first of these tokens. ``keys``: the cache's rows
            of all its tokens, the next ones included, in the order of positions.
        """
        positions = np.concatenate([first + np.arange(len(rows)) for rows, first, _ in parts])
        written = np.concatenate([keys[first : first + len(rows)] for rows, first, keys in parts])
        return cls(
            qkv_format="thd",
            position_ids=torch.from_numpy(positions),
            cache=cache,
            rows=torch.from_numpy(written),
            reach=Sight.of(parts),
        )


class InvariantAttention(TorchAttention):
    """Applies the rotary angles, then computes causal attention over packed input, as TorchAttention does.

    A query's result has the same bits in any batch.

    inv_freq: [d / 2] float32, the inverse frequencies; layers.py ``give_angles`` sets them.
    parts: the number of groups of heads that are computed one after the other. The rollout engine's
        model, which is not split, has one for each tensor rank of the trainer, to get the same bits.
    """

    inv_freq: torch.Tensor
    parts: int = 1

    def __init__(self, config, layer_number, *rest, **named):
        super().__init__(config, layer_number, *rest, **named)
        self.layer_number = layer_number

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None, **_
    ):
        if not isinstance(packed_seq_params, PackedSequences) or packed_seq_params.context.size > 1:
            raise TypeError("InvariantAttention takes PackedSequences that hold sequences whole")
        packed = packed_seq_params
        query, key = self._turned(query, key, packed.position_ids)
        scale = self.softmax_scale or query.shape[-1] ** -0.5
        if isinstance(packed, CachedSequences):
            key, value = packed.cache.write(self.layer_number, packed.rows, key, value)
            ranks = zip(*(x.chunk(self.parts, dim=1) for x in (query, key, value)), strict=True)
            return torch.cat([attend(*own, packed.reach, scale)[0] for own in ranks], dim=1).flatten(1)
        forward = partial(attend, sight=packed.once(Sight, lambda: Sight.of_layout(packed.layout)), scale=scale)
        return span_attention(query, key, value, packed.spans, scale, forward=forward).flatten(1)

    def _turned(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys rotated by the rotary angles of ``positions`` [T].

        Column i is rotated with column i + d / 2.
        """
        angles = torch.outer(positions.to(self.inv_freq.dtype), self.inv_freq)
        cos, sin = (elementwise(f, angles).to(query.dtype).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))

        def turned(x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2, dim=-1)
            return x * cos + torch.cat([-second, first], dim=-1) * sin

        return turned(query), turned(key)

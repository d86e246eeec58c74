"""Spans: which tokens of a micro-batch see which, as ranges of queries that see ranges of keys.

A span is one block of the attention matrix. It is a rectangle (all its queries see all its keys), a
causal triangle, or the mirrored triangle that a sliding window leaves
(model/attention/window_spans.py). A query may be in several spans; their softmaxes are merged by
their log-sum-exp (model/attention/flash.py). So nothing here has the size [queries, keys].

Under context parallelism queries stay on their rank, and keys and values are gathered. Each
sequence is split in 2·CP chunks, and rank r holds chunks r and 2·CP − 1 − r. So the work of causal
attention is equal on every rank. Megatron-Core's THD rotary embedding splits sequences in the same
way (0.16.1 ``models/common/embeddings/rope_utils.py``). A chunk sees itself by a triangle,
and all earlier tokens of its sequence by a rectangle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.distributed.platform import send


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextShard:
    """Describes this rank among the context-parallel ranks that share each sequence.

    rank: this rank's number among them, from 0.
    size: how many they are.
    group: their process group; None if this rank holds the sequences whole.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


WHOLE = ContextShard()


def context_positions(lengths: tuple[int, ...], rank: int, size: int) -> np.ndarray:
    """Return int64 [T / size], the indices of the micro-batch's tokens that context rank ``rank`` holds, in its order.

    Rank r holds chunks r and 2·size − 1 − r of each sequence's 2·size chunks.

    lengths: the number of tokens of each sequence, T together.

    Raises ValueError if a length does not split in 2·size chunks.

    Example: lengths (4, 8), size 2: rank 0 holds [0, 3, 4, 5, 10, 11], rank 1 holds [1, 2, 6, 7, 8,
    9].
    """
    if faulty := [length for length in lengths if size > 1 and length % (2 * size)]:
        raise ValueError(
            f"a sequence of {faulty[0]} tokens does not split in 2 x {size} chunks; pad it to a multiple of {2 * size}"
        )
    starts = [0, *itertools.accumulate(lengths)]
    parts = own_parts(lengths, ContextShard(rank=rank, size=size))
    return np.concatenate([starts[segment] + np.arange(first, first + count) for segment, _, first, count in parts])


class Span(NamedTuple):
    """Holds a range of queries, and the range of keys that they see.

    first_query: the index of the first query among this rank's tokens.
    first_key: the index of the first key in the whole micro-batch, over all context ranks.
    causal: True for a triangle: there are as many keys as queries, and query i sees keys 0 to i.
        False: each query sees all the keys.
    mirrored: True for a triangle in which query i sees key i and the keys after it; ``causal`` is
        then True as well.
    """

    first_query: int
    num_queries: int
    first_key: int
    num_keys: int
    causal: bool
    mirrored: bool = False

    @property
    def queries(self) -> slice:
        return slice(self.first_query, self.first_query + self.num_queries)

    @property
    def keys(self) -> slice:
        return slice(self.first_key, self.first_key + self.num_keys)


def own_parts(lengths: tuple[int, ...], context: ContextShard = WHOLE) -> Iterator[tuple[int, int, int, int]]:
    """Yield (segment, query, first, count) for each contiguous piece of this rank's tokens.

    lengths: the number of tokens of each segment, a run of tokens of one sequence.
    segment: the index of the piece's segment in ``lengths``.
    query: the index of the piece's first token among this rank's tokens.
    first: that token's index in the segment.
    count: the number of tokens.

    Without context parallelism a segment is one piece. With it, two of the segment's 2·CP chunks
    are pieces of this rank.
    """
    start = 0
    for segment, length in enumerate(lengths):
        tokens = length // (2 * context.size) if context.size > 1 else length
        for number in (context.rank, 2 * context.size - 1 - context.rank) if context.size > 1 else (0,):
            yield segment, start, number * tokens, tokens
            start += tokens


def causal_spans(lengths: tuple[int, ...], context: ContextShard = WHOLE) -> list[Span]:
    """Return the spans of this context rank's queries, for sequences of ``lengths`` tokens laid one after the other.

    Causal triangles (spans in which query i sees keys 0 to i) come first. Each query is in exactly
    one of them.

    Example: of one sequence of 8 tokens, rank 1 of 2 holds tokens 2 and 3 and tokens 4 and 5. Each
    pair sees itself by a triangle. By a rectangle the first pair sees keys 0 and 1, and the second
    pair keys 0 to 3.
    """
    starts, triangles, prefixes = [0, *itertools.accumulate(lengths)], [], []
    for segment, query, first, count in own_parts(lengths, context):
        triangles.append(Span(query, count, starts[segment] + first, count, True))
        if first:
            prefixes.append(Span(query, count, starts[segment], first, False))
    return triangles + prefixes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpanBatch:
    """Holds spans for one call of a kernel: all rectangles, all causal triangles or all mirrored triangles (``Span``).

    No two spans have a query in common. The tensors are for a kernel of variable lengths, and None
    on a CPU:

    query_rows, key_rows: int64, the indices of the spans' queries and keys, one span after the
        other. None also if they are all tokens in order.
    query_bounds, key_bounds: int32 [spans + 1], the index in ``query_rows`` or ``key_rows`` where
        each span begins, then the end.
    """

    spans: tuple[Span, ...]
    query_rows: torch.Tensor | None = None
    key_rows: torch.Tensor | None = None
    query_bounds: torch.Tensor | None = None
    key_bounds: torch.Tensor | None = None

    @property
    def causal(self) -> bool:
        return self.spans[0].causal

    @property
    def mirrored(self) -> bool:
        return self.spans[0].mirrored


def batch_spans(spans: Iterable[Span], num_queries: int, num_keys: int, device: torch.device) -> tuple[SpanBatch, ...]:
    """Return the spans in batches, each with its index tensors on ``device``.

    A batch's spans are all rectangles, all causal triangles or all mirrored triangles (``Span``). No
    two of them have a query in common.

    num_queries: the number of this rank's tokens.
    num_keys: the number of the micro-batch's tokens, over all context ranks.
    """
    groups: list[list[Span]] = []
    for span in spans:
        for group in groups:
            last = group[-1]
            alike = (last.causal, last.mirrored) == (span.causal, span.mirrored)
            if alike and last.queries.stop <= span.first_query:
                group.append(span)
                break
        else:
            groups.append([span])
    if device.type == "cpu":
        return tuple(SpanBatch(spans=tuple(group)) for group in groups)
    return tuple(_on_device(tuple(group), num_queries, num_keys, device) for group in groups)


def _on_device(spans: tuple[Span, ...], num_queries: int, num_keys: int, device: torch.device) -> SpanBatch:
    step = -1 if spans[0].mirrored else 1
    query_rows = np.concatenate([np.arange(span.queries.start, span.queries.stop)[::step] for span in spans])
    key_rows = np.concatenate([np.arange(span.keys.start, span.keys.stop)[::step] for span in spans])

    def rows(found: np.ndarray, everything: int) -> torch.Tensor | None:
        if np.array_equal(found, np.arange(everything)):
            return None
        return send(torch.from_numpy(found), device)

    def bounds(sizes: list[int]) -> torch.Tensor:
        return send(torch.from_numpy(np.cumsum([0, *sizes], dtype=np.int32)), device)

    return SpanBatch(
        spans=spans,
        query_rows=rows(query_rows, num_queries),
        key_rows=rows(key_rows, num_keys),
        query_bounds=bounds([span.num_queries for span in spans]),
        key_bounds=bounds([span.num_keys for span in spans]),
    )

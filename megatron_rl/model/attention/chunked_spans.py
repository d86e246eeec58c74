"""The spans (query ranges with the key ranges that they see) of a layer whose tokens see only their own chunk.

The token at position p sees positions (p // chunk) · chunk to p. Chunks are counted from a
sequence's first token, as in transformers 5.19 ``masking_utils.py`` chunked_overlay.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.model.attention.layout import Layout
from megatron_rl.model.attention.spans import ContextShard, Span, own_parts


def chunked_spans(layout: Layout, context: ContextShard, chunk_tokens: int) -> list[Span]:
    """Return the spans of this context rank's queries, in a layer with chunks of ``chunk_tokens`` positions.

    Causal triangles (spans in which query i sees keys 0 to i) come first, each query in exactly one.
    Rectangles follow, by which queries see the earlier keys of their chunk.

    Example: a sequence of 5 tokens in chunks of 2 has three triangles: tokens 0 and 1, tokens 2 and
    3, and token 4.
    """
    prompts = {s: prompt for prompt in layout.shared for s in layout.responses_of(prompt)}
    starts = layout.starts.tolist()
    triangles, others = [], []
    for segment, query, first, tokens in own_parts(layout.lengths, context):
        offset = layout.offsets[segment]
        for begin, end in _cut(first, first + tokens, offset, chunk_tokens):
            row, count = query + begin - first, end - begin
            triangles.append(Span(row, count, starts[segment] + begin, count, True))
            # the chunk's keys before these queries, in this segment and in the shared prompt before it
            seen_from = (offset + begin) // chunk_tokens * chunk_tokens
            own = max(seen_from - offset, 0)
            if own < begin:
                others.append(Span(row, count, starts[segment] + own, begin - own, False))
            if segment in prompts and seen_from < offset:
                place = starts[prompts[segment].segment] + seen_from
                others.append(Span(row, count, place, offset - seen_from, False))
    return triangles + others


def _cut(first: int, stop: int, offset: int, chunk_tokens: int) -> Iterator[tuple[int, int]]:
    """Split a segment's tokens [first, stop) wherever a chunk begins, and yield (begin, end) of each piece.

    A segment is a run of tokens of one sequence.

    first, stop: token indices in the segment, as are ``begin`` and ``end``.
    offset: the sequence position of the segment's first token.
    """
    while first < stop:
        end = min(stop, ((first + offset) // chunk_tokens + 1) * chunk_tokens - offset)
        yield first, end
        first = end

"""Spans of sliding-window attention: a token sees itself and the ``window - 1`` tokens before it in its sequence.

A span is a range of queries with the range of keys that they see. The queries are split in blocks
of the window's length. A block's queries see the block's own keys by a causal triangle. Of the keys
before the block, each later query sees one fewer of the earliest: a mirrored triangle. If the block
is shorter than the window, or fewer keys precede it, some queries see all these keys, or all queries
see some keys: rectangles. So kernels compute only the pairs within the window, and no mask tensor is
made.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.model.attention.layout import Layout
from megatron_rl.model.attention.spans import ContextShard, Span, own_parts


def windowed_spans(layout: Layout, context: ContextShard, window: int) -> list[Span]:
    """Return the spans of this context rank's queries in a layer with a sliding window.

    Causal triangles (spans in which query i sees keys 0 to i) come first, each query in exactly one.
    The others are of keys before a block of queries: rectangles, and mirrored triangles (query i
    sees key i and the keys after it).

    window: the number of tokens that a token sees, itself included; at least 1.

    Example: one sequence of 5 tokens, window 2: causal triangles of 2, 2 and 1 tokens. Query 2 sees
    key 1, and query 4 sees key 3, by mirrored triangles of one token.
    """
    triangles: list[Span] = []
    before: list[Span] = []
    prompts = {segment: prompt for prompt in layout.shared for segment in layout.responses_of(prompt)}
    for segment, query, first, count in own_parts(layout.lengths, context):
        start = int(layout.starts[segment])
        for done in range(0, count, window):
            own = min(window, count - done)
            block = (query + done, own)
            position = first + done
            triangles.append(Span(*block, start + position, own, True))
            before += _seen_before(*block, position, start, position, window)
            if segment in prompts:
                prompt = prompts[segment]
                place = int(layout.starts[prompt.segment])
                before += _seen_before(*block, prompt.tokens + position, place, prompt.tokens, window)
    return triangles + before


def _seen_before(query: int, count: int, position: int, key: int, num_keys: int, window: int) -> Iterator[Span]:
    """Yield the spans by which a block of neighbouring queries sees a range of earlier keys of the same sequence.

    query, count: the index of the block's first query among this rank's tokens, and the number of
        its queries.
    position: by how many positions of the sequence the first query comes after the first key.
    key, num_keys: the first key's index in the micro-batch, and the number of keys.
    window: the number of tokens that a token sees, itself included.

    Count queries i from the block's first query, and keys j from the first key. Then query i sees
    the keys j > i + position − window.
    """
    below = position - window + 1  # the number of keys before the first query's window
    # the first queries see every key
    whole = min(max(1 - below, 0), count)
    if whole and num_keys:
        yield Span(query, whole, key, num_keys, False)
    # the next queries see only the last keys: a mirrored triangle, and a rectangle after it
    partly = min(count, num_keys - below) - whole
    if partly > 0:
        first = whole + below
        yield Span(query + whole, partly, key + first, partly, True, True)
        if num_keys > first + partly:
            yield Span(query + whole, partly, key + first + partly, num_keys - first - partly, False)

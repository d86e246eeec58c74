"""Spans of sliding-window attention: a token sees itself and the ``window - 1`` tokens before it in its sequence.

A band of the attention matrix is cut in blocks of the window's length. A block sees itself by a
causal triangle, and of what lies before it a rectangle and a mirrored triangle: later queries see
fewer of the first keys. So the kernels compute no pair of a query and a key that the window leaves
out, and no mask is ever made.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.model.attention.layout import Layout
from megatron_rl.model.attention.spans import ContextShard, Span, own_parts


def windowed_spans(layout: Layout, context: ContextShard, window: int) -> list[Span]:
    """Return which queries of this rank see which keys within the window, by their positions in their own sequence.

    window: tokens that a token sees, itself among them; at least 1. The triangles, which hold every
        query once, come
    first.

    Example: one sequence of 5 tokens, window 2: triangles of 2, 2 and 1 tokens, and queries 2 and 4
    see keys 1 and 3 by mirrored triangles of one.
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
    """Yield the spans by which queries see keys that lie before all of them, in one sequence.

    query, count: the queries. position: the first one's, counted from the first key. key, num_keys:
        the keys.

    Query i sees key j from i + below on, where ``below`` is what lies outside the first query's
    window.
    """
    below = position - window + 1
    whole = min(max(1 - below, 0), count)  # queries that see every key
    if whole and num_keys:
        yield Span(query, whole, key, num_keys, False)
    partly = min(count, num_keys - below) - whole  # queries that see the last keys alone
    if partly > 0:
        first = whole + below
        yield Span(query + whole, partly, key + first, partly, True, True)
        if num_keys > first + partly:
            yield Span(query + whole, partly, key + first + partly, num_keys - first - partly, False)

"""Chunks of positions as spans: each query sees the keys that a naive mask says, once."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.model.attention_spans import ContextShard, context_positions
from megatron_rl.model.chunked_spans import chunked_spans
from megatron_rl.model.layout import Layout, SharedPrompt, lay_out


def seen(layout: Layout, chunk_tokens: int, context: ContextShard) -> np.ndarray:
    """Return int64 [queries of the rank, keys], how often each query sees each key."""
    found = np.zeros((layout.num_tokens // context.size, layout.num_tokens), dtype=np.int64)
    for span in chunked_spans(layout, context, chunk_tokens):
        part = np.ones((span.num_queries, span.num_keys), dtype=np.int64)
        found[span.queries, span.keys] += np.tril(part) if span.causal else part
    return found


def naive(layout: Layout, chunk_tokens: int) -> np.ndarray:
    """Return bool [T, T] by the rule: the same sequence or its shared prompt, not later, and in the same chunk."""
    segments = np.repeat(np.arange(len(layout.lengths)), layout.lengths)
    positions = layout.positions()
    prompt_of = {s: prompt for prompt in layout.shared for s in layout.responses_of(prompt)}
    found = np.zeros((layout.num_tokens,) * 2, dtype=bool)
    for query in range(layout.num_tokens):
        for key in range(layout.num_tokens):
            same = segments[query] == segments[key]
            prompt = prompt_of.get(int(segments[query]))
            if prompt is not None and segments[key] == prompt.segment:
                same = positions[key] < prompt.tokens
            earlier = positions[key] <= positions[query]
            found[query, key] = same and earlier and positions[key] // chunk_tokens == positions[query] // chunk_tokens
    return found


LAYOUTS = {
    "alone": Layout.of((8, 4, 12)),
    "shared": lay_out(np.array([5, 5, 3]), np.array([6, 2, 9]), np.array([0, 0, 1]), pad_multiple=4),
    "shared, the prompt ends a chunk": lay_out(np.array([8, 8, 8]), np.array([3, 7, 4]), np.zeros(3, int), 4),
}


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 7, 100])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_query_sees_its_own_chunk_once(name: str, size: int, chunk_tokens: int) -> None:
    layout = LAYOUTS[name]
    wanted = naive(layout, chunk_tokens)
    for rank in range(size):
        context = ContextShard(rank=rank, size=size)
        rows = context_positions(layout.lengths, rank, size)
        np.testing.assert_array_equal(seen(layout, chunk_tokens, context), wanted[rows])


def test_the_triangles_come_first_and_hold_every_query_once() -> None:
    spans = chunked_spans(LAYOUTS["shared"], ContextShard(), 3)
    kinds = [span.causal for span in spans]
    triangles = [span for span in spans if span.causal]
    assert kinds == sorted(kinds, reverse=True) and False in kinds
    rows = [row for span in triangles for row in range(span.queries.start, span.queries.stop)]
    assert rows == list(range(LAYOUTS["shared"].num_tokens))


def test_a_shared_prompts_pads_are_no_keys() -> None:
    assert LAYOUTS["shared"].shared == (SharedPrompt(segment=0, tokens=5, num_responses=2),)
    assert LAYOUTS["shared"].lengths[0] == 8
    assert seen(LAYOUTS["shared"], 100, ContextShard())[8:, 5:8].sum() == 0

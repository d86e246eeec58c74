"""Checks model/span_attention.py: spans merged by their log-sum-exp, on every kernel.

torch's CUDA kernels cannot run without a GPU. Loops with their signatures stand in for them here; they hold the calling
code to the kernels' contract: bounds, rows, padded log-sum-exps, grouped heads.
"""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.model import attention_spans, span_attention
from megatron_rl.model.attention import pack
from megatron_rl.model.attention_spans import WHOLE, ContextShard, Span, SpanBatch, causal_spans, context_positions
from megatron_rl.model.layout import Layout
from megatron_rl.model.window_spans import windowed_spans
from tests.unit.backend.packed import CPU

HEADS, GROUPS, WIDTH, SCALE = 4, 2, 8, 0.4

# A prompt of 5 tokens that two responses of 3 and 4 continue, and a sequence of 2 on its own.
SHARED = [Span(0, 5, 0, 5, True), Span(5, 3, 5, 3, True), Span(8, 4, 8, 4, True), Span(12, 2, 12, 2, True)]
SHARED += [Span(5, 7, 0, 5, False)]
# The second response continues the first one: three spans for some queries.
CHAIN = [*SHARED, Span(8, 4, 5, 3, False)]
CASES = {
    "whole": (causal_spans((5, 3, 6)), 14, 14),
    "context": (causal_spans((8, 16), ContextShard(rank=1, size=2)), 12, 24),
    "shared": (SHARED, 14, 14),
    "chain": (CHAIN, 14, 14),
    "window": (windowed_spans(Layout.of((9, 3, 7)), WHOLE, 3), 19, 19),
    "window, context": (windowed_spans(Layout.of((8, 16)), ContextShard(rank=1, size=2), 3), 12, 24),
}


def block_of(span: Span) -> torch.Tensor:
    """Return bool [queries, keys] of a span, True where a query sees a key."""
    block = torch.ones(span.num_queries, span.num_keys, dtype=torch.bool)
    if not span.causal:
        return block
    return block.triu() if span.mirrored else block.tril()


def seen(spans: list[Span], num_queries: int, num_keys: int) -> torch.Tensor:
    """Return bool [Q, K], True where a query sees a key."""
    found = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    for span in spans:
        found[span.queries, span.keys] |= block_of(span)
    return found


def naive(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return [Q, h, d] by one dense masked softmax."""
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), value)


def block_forward(q, k, v, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [n, h, d] and lse [h, n] of one block; k and v may have fewer heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def block_backward(g, q, k, v, out, lse, causal: bool, scale: float) -> list[torch.Tensor]:
    """Return the gradients of q, k and v as FlashAttention-2 takes them (Dao, 2023, arXiv:2307.08691, algorithm 2)."""
    groups = k.shape[1]
    k, v = (x.repeat_interleave(q.shape[1] // groups, dim=1) for x in (k, v))
    p = (torch.einsum("qhd,khd->hqk", q, k) * scale - lse[..., None]).exp()
    p = p.tril() if causal else p
    ds = p * (torch.einsum("qhd,khd->hqk", g, v) - (g * out).sum(-1).T[..., None]) * scale
    of_k, of_v = torch.einsum("hqk,qhd->khd", ds, q), torch.einsum("hqk,qhd->khd", p, g)
    return [
        torch.einsum("hqk,khd->qhd", ds, k),
        *(x.unflatten(1, (groups, -1)).sum(2) for x in (of_k, of_v)),
    ]


def flash_forward(q, k, v, q_bounds, k_bounds, max_q, max_k, dropout, causal, debug, *, scale):
    """Stands in for aten._flash_attention_forward over packed sequences."""
    assert q_bounds.dtype == k_bounds.dtype == torch.int32 and (dropout, debug) == (0.0, False)
    assert (int(q_bounds[-1]), int(k_bounds[-1])) == (len(q), len(k))
    assert (max_q, max_k) == (int(q_bounds.diff().max()), int(k_bounds.diff().max()))
    parts = [
        block_forward(q[a:b], k[c:d], v[c:d], causal, scale)
        for (a, b), (c, d) in zip(*(x.unfold(0, 2, 1).tolist() for x in (q_bounds, k_bounds)), strict=True)
    ]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses, dim=1), None, None, None


def flash_backward(g, q, k, v, out, lse, q_bounds, k_bounds, max_q, max_k, dropout, causal, state, unused, *, scale):
    """Stands in for aten._flash_attention_backward over packed sequences."""
    assert g.is_contiguous() and lse.is_contiguous() and lse.shape == (q.shape[1], len(q))
    parts = [
        block_backward(g[a:b], q[a:b], k[c:d], v[c:d], out[a:b], lse[:, a:b], causal, scale)
        for (a, b), (c, d) in zip(*(x.unfold(0, 2, 1).tolist() for x in (q_bounds, k_bounds)), strict=True)
    ]
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def efficient_forward(q, k, v, bias, with_lse, dropout, causal, *, scale):
    """Stands in for aten._scaled_dot_product_efficient_attention, which pads its log-sum-exps to a multiple of 32."""
    assert (bias, with_lse, dropout) == (None, True, 0.0)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    assert q.shape[1:] == k.shape[1:] == v.shape[1:]  # no grouped heads
    out, lse = block_forward(q, k, v, causal, scale)
    padded = torch.nn.functional.pad(lse, (0, -len(out) % 32), value=torch.nan)
    return out.transpose(0, 1)[None], padded[None], None, None


def efficient_backward(g, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal, *, scale):
    """Stands in for aten._scaled_dot_product_efficient_attention_backward."""
    assert (bias, dropout, wanted) == (None, 0.0, [True, True, True, False]) and lse.shape[2] % 32 == 0
    g, q, k, v, out = (x[0].transpose(0, 1) for x in (g, q, k, v, out))
    found = block_backward(g, q, k, v, out, lse[0, :, : len(q)], causal, scale)
    return *(x.transpose(0, 1)[None] for x in found), None


@pytest.fixture(params=["cpu", "cuda flash", "cuda memory-efficient"])
def kernel(request, monkeypatch: pytest.MonkeyPatch):
    """Chooses a kernel; those of CUDA are stood in for."""
    kernels = {
        "cpu": span_attention._CpuFlash,
        "cuda flash": span_attention._CudaFlash,
        "cuda memory-efficient": span_attention._CudaMemoryEfficient,
    }
    monkeypatch.setattr(span_attention, "_kernel_for", lambda _: kernels[request.param])
    if request.param != "cpu":
        stand_ins = types.SimpleNamespace(
            _flash_attention_forward=flash_forward,
            _flash_attention_backward=flash_backward,
            _scaled_dot_product_efficient_attention=efficient_forward,
            _scaled_dot_product_efficient_attention_backward=efficient_backward,
        )
        monkeypatch.setattr(span_attention, "aten", stand_ins)
    return kernels[request.param]


def batches(spans: list[Span], num_queries: int, num_keys: int) -> tuple[SpanBatch, ...]:
    """Batch the spans, with the rows and bounds that CUDA's kernels take."""
    found = attention_spans.batch_spans(spans, num_queries, num_keys, CPU)
    return tuple(attention_spans._on_device(batch.spans, num_queries, num_keys, CPU) for batch in found)


@pytest.mark.parametrize("case", CASES)
def test_spans_equal_one_masked_softmax(case: str, kernel) -> None:
    """Output and gradients of merged spans equal those of a dense masked softmax, in double."""
    spans, num_queries, num_keys = CASES[case]
    random = torch.Generator().manual_seed(0)
    query, key, value, coefficient = (
        torch.randn(n, h, WIDTH, dtype=torch.float64, generator=random, requires_grad=True)
        for n, h in ((num_queries, HEADS), (num_keys, GROUPS), (num_keys, GROUPS), (num_queries, HEADS))
    )
    found = span_attention.span_attention(query, key, value, batches(spans, num_queries, num_keys), SCALE)
    wanted = naive(query, key, value, seen(spans, num_queries, num_keys))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    inputs = (query, key, value)
    for x, y in zip(*(torch.autograd.grad((o * coefficient).sum(), inputs) for o in (found, wanted)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_sinks_equal_a_key_without_a_value(case: str, kernel) -> None:
    """Output and gradients, of the sinks too, equal those of a dense softmax over the scores and a logit per head."""
    spans, num_queries, num_keys = CASES[case]
    random = torch.Generator().manual_seed(0)
    query, key, value, coefficient, sinks = (
        torch.randn(*size, dtype=torch.float64, generator=random, requires_grad=True)
        for size in (
            *((n, h, WIDTH) for n, h in ((num_queries, HEADS), (num_keys, GROUPS), (num_keys, GROUPS))),
            (num_queries, HEADS, WIDTH),
            (HEADS,),
        )
    )
    found = span_attention.span_attention(query, key, value, batches(spans, num_queries, num_keys), SCALE, sinks=sinks)
    keys, values = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * SCALE
    scores = scores.masked_fill(~seen(spans, num_queries, num_keys), -torch.inf)
    with_sinks = torch.cat([scores, sinks[:, None, None].expand(-1, num_queries, 1)], dim=-1)
    wanted = torch.einsum("hqk,khd->qhd", with_sinks.softmax(-1)[..., :-1], values)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    inputs = (query, key, value, sinks)
    for x, y in zip(*(torch.autograd.grad((o * coefficient).sum(), inputs) for o in (found, wanted)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_parts_in_bfloat16_are_added_in_float32(case: str, kernel) -> None:
    """bfloat16 in, bfloat16 out, and no further from the dense softmax in double than bfloat16's rounding."""
    spans, num_queries, num_keys = CASES[case]
    random = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(n, h, WIDTH, generator=random).bfloat16().requires_grad_()
        for n, h in ((num_queries, HEADS), (num_keys, GROUPS), (num_keys, GROUPS))
    )
    found = span_attention.span_attention(query, key, value, batches(spans, num_queries, num_keys), SCALE)
    doubles = [x.detach().double().requires_grad_() for x in (query, key, value)]
    wanted = naive(*doubles, seen(spans, num_queries, num_keys))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, rtol=0.02, atol=0.02)
    gradients = torch.autograd.grad(found.float().square().sum(), (query, key, value))
    for x, y in zip(gradients, torch.autograd.grad(wanted.square().sum(), doubles), strict=True):
        assert x.dtype == torch.bfloat16
        assert float((x.double() - y).norm() / y.norm()) < 0.03


def test_batches_are_few_and_rows_are_given_only_where_they_differ() -> None:
    """One batch for whole sequences, two under context parallelism, three where a query is in three spans."""
    assert [len(batches(*CASES[case])) for case in ("whole", "context", "shared", "chain")] == [1, 2, 2, 3]
    (whole,) = batches(*CASES["whole"])
    assert whole.query_rows is None and whole.key_rows is None
    assert whole.query_bounds.tolist() == whole.key_bounds.tolist() == [0, 5, 8, 14]
    triangles, prompts = batches(*CASES["shared"])
    assert triangles.query_rows is None and triangles.key_rows is None
    assert prompts.query_rows.tolist() == list(range(5, 12)) and prompts.key_rows.tolist() == list(range(5))
    assert prompts.query_bounds.tolist() == [0, 7] and prompts.key_bounds.tolist() == [0, 5]
    _, prefixes = batches(*CASES["context"])
    assert np.array_equal(prefixes.key_rows, [0, 1, *range(4), *range(8, 12), *range(8, 16)])


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    size=st.sampled_from([1, 2, 4]),
    chunks=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    data=st.data(),
)
def test_spans_are_the_causal_matrix(size: int, chunks: list[int], data: st.DataObject) -> None:
    """A rank's spans hold each pair of a query and a key that it sees once, and no other pair.

    The first batch holds every query, and no batch holds a query twice.
    """
    lengths = tuple(n * 2 * size if size > 1 else n for n in chunks)
    shard = ContextShard(rank=data.draw(st.integers(0, size - 1)), size=size)
    packed = pack(Layout.of(lengths), CPU, shard)
    held = context_positions(lengths, shard.rank, size)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    wanted = (sequence[held][:, None] == sequence[None]) & (held[:, None] >= np.arange(sum(lengths))[None])

    found = np.zeros(wanted.shape, dtype=int)
    for number, batch in enumerate(packed.spans):
        queries = np.zeros(len(held), dtype=int)
        for span in batch.spans:
            block = np.ones((span.num_queries, span.num_keys), dtype=int)
            found[span.queries, span.keys] += np.tril(block) if span.causal else block
            queries[span.queries] += 1
            assert span.causal == batch.causal
        assert (queries == 1).all() if number == 0 else (queries <= 1).all()
    assert np.array_equal(found, wanted.astype(int))
    assert packed.qkv_format == "thd" and packed.layout.lengths == lengths and packed.cu_seqlens_q is None

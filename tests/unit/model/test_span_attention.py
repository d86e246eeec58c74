"""Checks model/attention/flash.py: spans merged by their log-sum-exp, on every kernel.

torch's CUDA kernels cannot run without a GPU. Loops with their signatures stand in for them here; they hold the calling
code to the kernels' contract: bounds, rows, padded log-sum-exps, grouped heads.
"""

import types

import numpy as np
import pytest
import torch

from megatron_rl.model.attention import flash as span_attention
from megatron_rl.model.attention import spans as attention_spans
from megatron_rl.model.attention.layout import Layout
from megatron_rl.model.attention.spans import WHOLE, ContextShard, Span, SpanBatch, causal_spans
from megatron_rl.model.attention.window_spans import windowed_spans
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
    return [torch.einsum("hqk,khd->qhd", ds, k), *(x.unflatten(1, (groups, -1)).sum(2) for x in (of_k, of_v))]


def pieces(*bounds: torch.Tensor):
    """Return the slices of queries and keys of each packed sequence."""
    return zip(*([slice(*pair) for pair in x.unfold(0, 2, 1).tolist()] for x in bounds), strict=True)


def flash_forward(q, k, v, q_bounds, k_bounds, max_q, max_k, dropout, causal, debug, *, scale):
    """Stands in for aten._flash_attention_forward over packed sequences."""
    assert q_bounds.dtype == k_bounds.dtype == torch.int32 and (dropout, debug) == (0.0, False)
    assert (int(q_bounds[-1]), int(k_bounds[-1])) == (len(q), len(k))
    assert (max_q, max_k) == (int(q_bounds.diff().max()), int(k_bounds.diff().max()))
    parts = [block_forward(q[a], k[b], v[b], causal, scale) for a, b in pieces(q_bounds, k_bounds)]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses, dim=1), None, None, None


def flash_backward(g, q, k, v, out, lse, q_bounds, k_bounds, max_q, max_k, dropout, causal, state, unused, *, scale):
    """Stands in for aten._flash_attention_backward over packed sequences."""
    assert g.is_contiguous() and lse.is_contiguous() and lse.shape == (q.shape[1], len(q))
    parts = [
        block_backward(g[a], q[a], k[b], v[b], out[a], lse[:, a], causal, scale) for a, b in pieces(q_bounds, k_bounds)
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


def seen(spans: list[Span], num_queries: int, num_keys: int) -> torch.Tensor:
    """Return bool [Q, K], True where a query sees a key."""
    found = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    for span in spans:
        block = torch.ones(span.num_queries, span.num_keys, dtype=torch.bool)
        found[span.queries, span.keys] |= block if not span.causal else block.triu() if span.mirrored else block.tril()
    return found


def inputs(case: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return query, key and value of a case, and a logit per head."""
    _, num_queries, num_keys = CASES[case]
    sizes = ((num_queries, HEADS, WIDTH), (num_keys, GROUPS, WIDTH), (num_keys, GROUPS, WIDTH), (HEADS,))
    random = torch.Generator().manual_seed(0)
    return [torch.randn(*size, dtype=torch.float64, generator=random).to(dtype).requires_grad_() for size in sizes]


def naive(case: str, query, key, value, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Return [Q, h, d] by one dense masked softmax; sinks: a key's logit per head, which has no value."""
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    scores = scores.masked_fill(~seen(*CASES[case]), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_spans_equal_one_masked_softmax(case: str, with_sinks: bool, kernel) -> None:
    """Output and gradients of merged spans, and of sinks, equal those of a dense masked softmax, in double."""
    *leaves, sinks = inputs(case, torch.float64)
    given = [*leaves, sinks] if with_sinks else leaves
    named = dict(sinks=sinks) if with_sinks else {}
    found = span_attention.span_attention(*leaves, batches(*CASES[case]), SCALE, **named)
    wanted = naive(case, *given)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    coefficient = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for x, y in zip(*(torch.autograd.grad((o * coefficient).sum(), given) for o in (found, wanted)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("small_span", [0, 6, span_attention.SMALL_SPAN])
@pytest.mark.parametrize("case", CASES)
def test_parts_in_bfloat16_are_added_in_float32(case: str, small_span: int, kernel, monkeypatch) -> None:
    """bfloat16 in, bfloat16 out, and no further from the dense softmax in double than bfloat16's rounding.

    On a CPU no span's gradient is computed in float32, some are, or all.
    """
    monkeypatch.setattr(span_attention, "SMALL_SPAN", small_span)
    leaves = inputs(case, torch.bfloat16)[:3]
    found = span_attention.span_attention(*leaves, batches(*CASES[case]), SCALE)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    wanted = naive(case, *doubles)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, rtol=0.02, atol=0.02)
    gradients = torch.autograd.grad(found.float().square().sum(), leaves)
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

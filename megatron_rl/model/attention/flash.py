"""Attention over spans (query ranges with the key ranges that they see), by torch's flash kernels, with its gradient.

Each kernel call gives a span's output out_i and log-sum-exp lse_i. The merged log-sum-exp is lse =
log Σ exp(lse_i), and with the weights w_i = exp(lse_i − lse) a query's output is Σ w_i · out_i. The
kernel's backward for a span computes probabilities as exp(score − lse). So if it is given the
merged output and the merged lse, it gives the span's contribution to the whole gradient (as in Ring
Attention, Liu et al., 2023, arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from megatron_rl.model.attention.spans import Span, SpanBatch

aten = torch.ops.aten
Rows = slice | torch.Tensor
EVERYTHING = slice(None)
SMALL_SPAN = 256  # tokens
_LSE_MULTIPLE = 32  # the memory-efficient kernel pads log-sum-exps to it (pytorch, attention.cu: kAlignLSE)


def span_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batches: tuple[SpanBatch, ...],
    scale: float,
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output [T, h, d] of queries [T, h, d], each over the keys of the spans that contain it.

    key, value: [K, g, d]; g divides h.
    batches: the spans. No two spans of a batch have a query in common, and the first batch contains
        every query.
    scale: multiplies the scores.
    forward: (query, key, value) → (output [T, h, d], log-sum-exp [h, T]), called in place of the
        kernels' forward; the gradient still comes from the kernels. None calls the kernels.
    sinks: [h], a learned logit per head in the denominator of each query's softmax, without a value
        (gpt-oss; the attention sinks of Xiao et al., 2023, arXiv:2309.17453, but learned). None
        without sinks.
    """
    return _SpanAttention.apply(query, key, value, batches, scale, forward, sinks)


class _SpanAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, batches, scale, forward, sinks):
        kernel = _kernel_for(query)
        out, lse = (forward or partial(_merged, kernel, batches=batches, scale=scale))(query, key, value)
        if sinks is not None:
            out, lse = _with_sinks(out, lse, sinks)
        ctx.save_for_backward(query, key, value, out, lse, sinks)
        ctx.kernel, ctx.batches, ctx.scale = kernel, batches, scale
        return out

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, out, lse, sinks = ctx.saved_tensors
        of_sinks = None if sinks is None else _sinks_gradient(gradient, out, lse, sinks)
        totals: list[torch.Tensor] = []
        for batch in ctx.batches:
            parts = ctx.kernel.backward(gradient, query, key, value, out, lse, batch, ctx.scale)
            for query_rows, key_rows, *gradients in parts:
                rows = (query_rows, key_rows, key_rows)
                if len(ctx.batches) == 1 and all(x is EVERYTHING for x in rows):
                    return (*gradients, None, None, None, of_sinks)
                if not totals:
                    dtype = _wide(query.dtype) if len(ctx.batches) > 1 else query.dtype
                    totals = [torch.zeros_like(x, dtype=dtype) for x in (query, key, value)]
                for total, where, part in zip(totals, rows, gradients, strict=True):
                    _add(total, where, part)
        return (*(total.to(query.dtype) for total in totals), None, None, None, of_sinks)


def _with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output [T, h, d] and log-sum-exp [h, T] after each head's sink is added to its softmaxes' denominators.

    The output is multiplied by exp(lse − logaddexp(lse, sink)), the probability that the sink
    leaves to the keys.
    """
    together = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return (out * (lse - together).exp().mT[..., None]).to(out.dtype), together


def _sinks_gradient(gradient: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return [h], the gradient of the sinks: Σ over queries of −p · (gradient · out), with p the sink's probability.

    ``gradient`` is the gradient of ``out``, both [T, h, d]. The gradient of any score is p · (value
    · gradient − out · gradient), and a sink's value is 0.
    """
    shares = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(shares * (gradient.to(lse.dtype) * out.to(lse.dtype)).sum(-1).mT).sum(-1).to(sinks.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which results of ``dtype`` are added up: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def _add(total: torch.Tensor, rows: Rows, part: torch.Tensor) -> None:
    if isinstance(rows, slice):
        total[rows] += part
    else:
        total.index_add_(0, rows, part.to(total.dtype))


def _merged(kernel, query, key, value, *, batches, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [T, h, d] and log-sum-exp [h, T] of all queries, each merged over the query's spans.

    kernel: ``_CpuFlash``, ``_CudaFlash`` or ``_CudaMemoryEfficient``, which computes one batch of
        spans.
    batches, scale: as in ``span_attention``.
    """
    first, *others = batches
    out = lse = None
    for rows, part, part_lse in kernel.forward(query, key, value, first, scale):
        if rows is EVERYTHING and not others:
            return part, part_lse
        if out is None:
            out = torch.empty_like(query, dtype=_wide(query.dtype) if others else query.dtype)
            lse = part_lse.new_empty(query.shape[1], query.shape[0])
        out[rows], lse[:, rows] = part, part_lse
    for batch in others:
        for rows, part, part_lse in kernel.forward(query, key, value, batch, scale):
            before, together = lse[:, rows], torch.logaddexp(lse[:, rows], part_lse)
            kept, added = ((x - together).exp().mT[..., None] for x in (before, part_lse))
            out[rows], lse[:, rows] = out[rows] * kept + part * added, together
    return out.to(query.dtype), lse


def _kernel_for(query: torch.Tensor):
    if query.device.type == "cpu":
        return _CpuFlash
    return _CudaFlash if query.dtype in (torch.bfloat16, torch.float16) else _CudaMemoryEfficient


def _heads_first(x: torch.Tensor, rows: slice, mirrored: bool = False) -> torch.Tensor:
    """Return tokens ``rows``, n of them, of x [T, h, d] as [1, h, n, d], in reverse order if ``mirrored``.

    Reversing the queries and the keys of a mirrored span (spans.py ``Span``) makes its mask causal.
    """
    return _turned(x[rows], mirrored).transpose(0, 1)[None]


def _turned(x: torch.Tensor, mirrored: bool, dim: int = 0) -> torch.Tensor:
    """Return x, or if ``mirrored`` a copy of x in reverse order along ``dim``."""
    return x.flip(dim) if mirrored else x


class _CpuFlash:
    """Calls torch's flash kernel for CPUs once for each span: a range of queries with the keys that they see.

    Fewer key heads than query heads need torch 2.9 or later. Backward computes small spans in float32 at least: there
    torch 2.13's kernel takes several times as long in bfloat16 (docs/evidence/performance.md).
    """

    @staticmethod
    def forward(query, key, value, batch, scale) -> Iterator[tuple[Rows, torch.Tensor, torch.Tensor]]:
        for span in batch.spans:
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                _heads_first(query, span.queries, span.mirrored),
                _heads_first(key, span.keys, span.mirrored),
                _heads_first(value, span.keys, span.mirrored),
                0.0,
                span.causal,
                scale=scale,
            )
            yield span.queries, _turned(out[0].transpose(0, 1), span.mirrored), _turned(lse[0], span.mirrored, 1)

    @staticmethod
    def backward(gradient, query, key, value, out, lse, batch, scale) -> Iterator[tuple]:
        given = (gradient, query, key, value, out)
        wide = tuple(x.to(_wide(x.dtype)) for x in given) if any(map(_is_small, batch.spans)) else given
        for span in batch.spans:
            at_out, own_query, own_key, own_value, own_out = wide if _is_small(span) else given
            gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _heads_first(at_out, span.queries, span.mirrored),
                _heads_first(own_query, span.queries, span.mirrored),
                _heads_first(own_key, span.keys, span.mirrored),
                _heads_first(own_value, span.keys, span.mirrored),
                _heads_first(own_out, span.queries, span.mirrored),
                _turned(lse[:, span.queries], span.mirrored, 1)[None].contiguous(),
                0.0,
                span.causal,
                scale=scale,
            )
            yield span.queries, span.keys, *(_turned(x[0].transpose(0, 1), span.mirrored) for x in gradients)


def _is_small(span: Span) -> bool:
    return max(span.num_queries, span.num_keys) < SMALL_SPAN


class _CudaFlash:
    """Calls FlashAttention's variable-length kernel in torch, once for each batch of spans, in bfloat16 or float16.

    A span is a range of queries with the keys that they see. ``torch.nn.attention.varlen.varlen_attn``
    calls the same kernel (torch 2.11 and 2.13). It is not used: its backward cannot be given a
    log-sum-exp merged over spans.
    """

    @staticmethod
    def forward(query, key, value, batch, scale) -> Iterator[tuple[Rows, torch.Tensor, torch.Tensor]]:
        out, lse, *_ = aten._flash_attention_forward(
            _take(query, batch.query_rows),
            _take(key, batch.key_rows),
            _take(value, batch.key_rows),
            *_CudaFlash._bounds(batch),
            0.0,
            batch.causal,
            False,
            scale=scale,
        )
        yield _rows(batch.query_rows), out, lse

    @staticmethod
    def backward(gradient, query, key, value, out, lse, batch, scale) -> Iterator[tuple]:
        unused = query.new_zeros(2, dtype=torch.uint64)  # dropout's random state, which is not read
        gradients = aten._flash_attention_backward(
            _take(gradient, batch.query_rows).contiguous(),
            _take(query, batch.query_rows),
            _take(key, batch.key_rows),
            _take(value, batch.key_rows),
            _take(out, batch.query_rows),
            lse[:, _rows(batch.query_rows)].contiguous(),
            *_CudaFlash._bounds(batch),
            0.0,
            batch.causal,
            unused,
            unused,
            scale=scale,
        )
        yield _rows(batch.query_rows), _rows(batch.key_rows), *gradients

    @staticmethod
    def _bounds(batch: SpanBatch) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        longest = (max(span.num_queries for span in batch.spans), max(span.num_keys for span in batch.spans))
        return batch.query_bounds, batch.key_bounds, *longest


class _CudaMemoryEfficient:
    """Calls torch's memory-efficient CUDA kernel for each ``Span``, for dtypes that FlashAttention does not take."""

    @staticmethod
    def forward(query, key, value, batch, scale) -> Iterator[tuple[Rows, torch.Tensor, torch.Tensor]]:
        for span in batch.spans:
            out, lse, *_ = aten._scaled_dot_product_efficient_attention(
                _heads_first(query, span.queries, span.mirrored),
                _repeated(_heads_first(key, span.keys, span.mirrored), query.shape[1]),
                _repeated(_heads_first(value, span.keys, span.mirrored), query.shape[1]),
                None,
                True,
                0.0,
                span.causal,
                scale=scale,
            )
            lse = _turned(lse[0, :, : span.num_queries], span.mirrored, 1)
            yield span.queries, _turned(out[0].transpose(0, 1), span.mirrored), lse

    @staticmethod
    def backward(gradient, query, key, value, out, lse, batch, scale) -> Iterator[tuple]:
        heads, groups = query.shape[1], key.shape[1]
        unused = query.new_zeros((), dtype=torch.int64)  # dropout's random state, which is not read
        for span in batch.spans:
            pad = -span.num_queries % _LSE_MULTIPLE
            of_query, *of_keys, _ = aten._scaled_dot_product_efficient_attention_backward(
                _heads_first(gradient, span.queries, span.mirrored),
                _heads_first(query, span.queries, span.mirrored),
                _repeated(_heads_first(key, span.keys, span.mirrored), heads),
                _repeated(_heads_first(value, span.keys, span.mirrored), heads),
                None,
                _heads_first(out, span.queries, span.mirrored),
                F.pad(_turned(lse[:, span.queries], span.mirrored, 1)[None], (0, pad), value=torch.inf),
                unused,
                unused,
                0.0,
                [True, True, True, False],
                span.causal,
                scale=scale,
            )
            summed = (x[0].unflatten(0, (groups, heads // groups)).sum(1) for x in of_keys)
            gradients = (x.transpose(0, 1) for x in (of_query[0], *summed))
            yield span.queries, span.keys, *(_turned(x, span.mirrored) for x in gradients)


def _repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return key or value heads [1, g, n, d] as [1, heads, n, d]: each head is repeated heads / g times.

    heads: the number of query heads.
    """
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _take(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return x if rows is None else x.index_select(0, rows)


def _rows(rows: torch.Tensor | None) -> Rows:
    return EVERYTHING if rows is None else rows

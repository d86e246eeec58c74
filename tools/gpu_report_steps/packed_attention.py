"""Checks and measures the attention of torch's layers over packed sequences (megatron_rl/model/attention/flash.py).

    python tools/gpu_report_steps/packed_attention.py --json packed.json

Output and gradients of whole sequences, of one rank of two under context parallelism and of answers that share their
prompt, in bfloat16 (FlashAttention over packed sequences) and float32 (the memory-efficient kernel), against a masked
softmax in float64. The bound is on the norm of the difference over the norm: 0.02 in bfloat16, 1e-5 in float32. Then
seconds and FLOP/s of micro-batches of up to 8,192 tokens, 28 query and 4 key-value heads of 128, bfloat16, forward and
backward, first and second call. FLOP: 4 · pairs · heads · 128 forward, 2.5 times that backward.
"""

from __future__ import annotations

import argparse
import pathlib

import torch
from clock import DEVICE, seconds_of, write

from megatron_rl.model.attention.flash import span_attention
from megatron_rl.model.attention.spans import ContextShard, Span, SpanBatch, batch_spans, causal_spans

HEAD, QUERIES, GROUPS = 128, 28, 4
BOUNDS = {torch.bfloat16: 0.02, torch.float32: 1e-5}
# A prompt of 90 tokens, and two answers that continue it.
SHARED = [Span(0, 90, 0, 90, True), Span(90, 41, 90, 41, True), Span(131, 66, 131, 66, True)]
SHARED += [Span(90, 107, 0, 90, False)]
CHECKED = {
    "whole": (causal_spans((130, 61, 257)), 448, 448),
    "context": (causal_spans((128, 384), ContextShard(rank=1, size=2)), 256, 512),
    "shared": (SHARED, 197, 197),
}
MICRO_BATCHES = {"one sequence": (8192,), "four": (2048,) * 4, "ragged": (3989, 2011, 1033, 779, 380)}


def tensors(num_queries: int, num_keys: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return query, key and value with gradients."""
    random = torch.Generator(DEVICE).manual_seed(0)
    options = dict(device=DEVICE, dtype=dtype, generator=random, requires_grad=True)
    sizes = ((num_queries, QUERIES), (num_keys, GROUPS), (num_keys, GROUPS))
    return [torch.randn(n, h, HEAD, **options) for n, h in sizes]


def masked_softmax(query, key, value, spans: list[Span]) -> torch.Tensor:
    """Return the same attention by one dense mask."""
    seen = torch.zeros(len(query), len(key), dtype=torch.bool, device=DEVICE)
    for span in spans:
        block = torch.ones(span.num_queries, span.num_keys, dtype=torch.bool, device=DEVICE)
        seen[span.queries, span.keys] = block.tril() if span.causal else block
    key, value = (x.repeat_interleave(QUERIES // GROUPS, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * HEAD**-0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


def check(name: str, dtype: torch.dtype) -> dict:
    """Return the worst relative error of output and gradients."""
    spans, num_queries, num_keys = CHECKED[name]
    inputs = tensors(num_queries, num_keys, dtype)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    out = span_attention(*inputs, batch_spans(spans, num_queries, num_keys, DEVICE), HEAD**-0.5)
    wanted = masked_softmax(*doubles, spans)
    gradient = torch.randn(out.shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)).to(dtype)
    found = [out, *torch.autograd.grad(out, inputs, gradient)]
    expected = [wanted.detach(), *torch.autograd.grad(wanted, doubles, gradient.double())]
    errors = [float((x.detach() - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True)]
    return {"case": name, "dtype": str(dtype).removeprefix("torch."), "error": max(errors), "bound": BOUNDS[dtype]}


def measure(name: str, lengths: tuple[int, ...]) -> dict:
    """Return seconds of the first and the second forward and backward, and the second's FLOP/s."""
    inputs = tensors(sum(lengths), sum(lengths), torch.bfloat16)
    spans: tuple[SpanBatch, ...] = batch_spans(causal_spans(lengths), sum(lengths), sum(lengths), DEVICE)

    def step() -> None:
        out = span_attention(*inputs, spans, HEAD**-0.5)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    first, second = seconds_of(step), seconds_of(step)
    operations = 3.5 * 2 * sum(n * n for n in lengths) * QUERIES * HEAD
    return {"case": name, "first_s": first, "second_s": second, "tflops": operations / second / 1e12}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/gpu_report_steps/packed_attention.py --json packed.json",
    )
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--small", action="store_true", help="short sequences")
    given = parser.parse_args(arguments)
    checks = [check(name, dtype) for dtype in BOUNDS for name in CHECKED]
    shorter = 32 if given.small else 1
    speeds = [measure(name, tuple(n // shorter for n in lengths)) for name, lengths in MICRO_BATCHES.items()]
    wrong = [x for x in checks if not x["error"] <= x["bound"]]
    says = [f"worst error: {max(x['error'] / x['bound'] for x in checks):.2g} of its bound"]
    says += [f"{x['case']}: {1e3 * x['second_s']:.3g} ms, {x['tflops']:.3g} TFLOP/s" for x in speeds]
    failed = "; ".join(f"{x['case']} in {x['dtype']}: {x['error']:.2g} above {x['bound']:g}" for x in wrong)
    return write(given.json, {"headline": says, "checks": checks, "speeds": speeds, "failed": failed})


if __name__ == "__main__":
    raise SystemExit(main())

"""Times attention on one CPU core: the next tokens of the embedded engine, and gradients of short spans in the update.

    python tools/benchmarks/cpu_attention.py --heads 9 --key-heads 3 --size 64

Decoding: one query for each of some rows over 80 cached keys, by transformers' ``sdpa`` and with grouped query heads
(rollout/engines/grouped_queries.py). Gradients: the backward pass of a span alone, by torch's kernel in the model's
dtype, and through model/attention/flash.py, which computes small spans in float32. Both sides' numbers are compared
before they are timed. Each figure is the median of --repeats calls, in milliseconds, the two sides in turn.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from megatron_rl.model.attention.flash import aten, span_attention
from megatron_rl.model.attention.spans import Span, SpanBatch
from megatron_rl.rollout.engines.grouped_queries import grouped_attention

KEYS, SCALE = 80, 0.125
ROWS = (4, 16, 32)
SPANS = ((17, 17, True), (17, 59, False), (59, 59, True), (136, 59, False), (255, 255, True), (512, 512, True))
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ROUNDING = {"bfloat16": 3e-2, "float32": 1e-4}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/benchmarks/cpu_attention.py --heads 16 --key-heads 8 --size 128",
    )
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--key-heads", type=int, default=3)
    parser.add_argument("--size", type=int, default=64, help="of a head")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures there")
    given = parser.parse_args(arguments)
    if min(given.heads, given.key_heads, given.size, given.repeats) < 1 or given.heads % given.key_heads:
        parser.error(f"--heads {given.heads} must be a multiple of --key-heads {given.key_heads}, and all at least 1")
    return given


def timed(sides: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Return the median milliseconds of each side; the sides take turns."""
    found: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats + 2):
        for times, side in zip(found, sides, strict=True):
            started = time.perf_counter()
            side()
            times.append(1e3 * (time.perf_counter() - started))
    return [statistics.median(times[2:]) for times in found]


def decoding(given: argparse.Namespace, dtype: str, rows: int, masked: bool) -> dict[str, object]:
    """Return the milliseconds of one layer's attention of one token of each row."""
    query = torch.randn(rows, given.heads, 1, given.size).to(DTYPES[dtype])
    key, value = (torch.randn(rows, given.key_heads, KEYS, given.size).to(DTYPES[dtype]) for _ in range(2))
    mask = torch.rand(rows, 1, 1, KEYS) < 0.9 if masked else None
    module = SimpleNamespace(num_key_value_groups=given.heads // given.key_heads, is_causal=True)

    def before() -> tuple[torch.Tensor, None]:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=SCALE)

    def now() -> tuple[torch.Tensor, None]:
        return grouped_attention(module, query, key, value, mask, scaling=SCALE)

    torch.testing.assert_close(before()[0], now()[0], atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
    times = timed((before, now), given.repeats)
    what = f"{rows} rows, {'mask' if masked else 'no mask'}"
    return {"what": what, "dtype": dtype, "before_ms": times[0], "now_ms": times[1]}


def gradients(given: argparse.Namespace, dtype: str, span: tuple[int, int, bool]) -> dict[str, object]:
    """Return the milliseconds of the backward pass of one span of (queries, keys, causal)."""
    queries, keys, causal = span
    sizes = ((queries, given.heads), (keys, given.key_heads), (keys, given.key_heads))
    leaves = [torch.randn(*size, given.size).to(DTYPES[dtype]).requires_grad_() for size in sizes]
    batches = (SpanBatch(spans=(Span(0, queries, 0, keys, causal),)),)
    out = span_attention(*leaves, batches, SCALE)
    gradient = torch.randn_like(out)
    whole = [x.detach().transpose(0, 1)[None] for x in leaves]
    kernel_out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*whole, 0.0, causal, scale=SCALE)
    at = gradient.transpose(0, 1)[None]

    def before() -> Sequence[torch.Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            at, *whole, kernel_out, lse, 0.0, causal, scale=SCALE
        )

    def now() -> Sequence[torch.Tensor]:
        return torch.autograd.grad(out, leaves, gradient, retain_graph=True)

    for one, other in zip(before(), now(), strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one[0].transpose(0, 1), other, atol=ROUNDING[dtype] * scale, rtol=ROUNDING[dtype])
    times = timed((before, now), given.repeats)
    what = f"{queries} queries, {keys} keys{', causal' if causal else ''}"
    return {"what": what, "dtype": dtype, "before_ms": times[0], "now_ms": times[1]}


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        rows = [decoding(given, d, n, masked) for d in DTYPES for n in ROWS for masked in (True, False)]
    rows += [gradients(given, dtype, span) for dtype in DTYPES for span in SPANS]
    print("| attention | dtype | torch's own, ms | here, ms | times as fast |\n|---|---|---|---|---|")
    for row in rows:
        ratio = row["before_ms"] / row["now_ms"]
        print(f"| {row['what']} | {row['dtype']} | {row['before_ms']:.2f} | {row['now_ms']:.2f} | {ratio:.1f} |")
    heads = f"{given.heads} heads of {given.size}, {given.key_heads} of keys"
    print(f"torch {torch.__version__}, {platform.machine()}, one core; {heads}")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

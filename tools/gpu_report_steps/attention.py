"""Measures scaled-dot-product attention at lengths that were not seen before: the first call and the second.

    python tools/gpu_report_steps/attention.py --json attention.json

bfloat16, 28 query and 4 key-value heads of 128, causal, forward and backward. cuDNN builds a plan for every new shape;
where its first call takes 50 ms more than its second, changing lengths pay for plans. One decoding step (one query over
1 to 64 keys) shows the same for an engine. FLOP/s: 4 · length² · heads · 128 / 2 forward, 2.5 times that backward.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import statistics

import torch
from clock import DEVICE, seconds_of, write
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

HEAD, QUERIES, GROUPS = 128, 28, 4
LENGTHS = (517, 779, 1033, 1501, 2011, 2503, 3001, 3989, 4507, 5521, 6491, 7993)
BACKENDS = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "torch's choice": None,
}


def attend(length: int, keys: int | None = None) -> None:
    """Run one causal forward and backward; with `keys`, one query over so many keys, forward alone."""
    kind = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    options = dict(device=DEVICE, dtype=kind, requires_grad=keys is None)
    query = torch.randn(1, QUERIES, length, HEAD, **options)
    key, value = (torch.randn(1, GROUPS, keys or length, HEAD, **options) for _ in range(2))
    out = scaled_dot_product_attention(query, key, value, is_causal=keys is None, enable_gqa=True)
    if keys is None:
        out.sum().backward()


def measure(backend: str, lengths: tuple[int, ...], keys: tuple[int, ...]) -> dict:
    """Return the backend's seconds per length, or the reason why it cannot run here."""
    chosen = BACKENDS[backend]
    context = sdpa_kernel(chosen) if chosen else contextlib.nullcontext()
    row: dict = {"backend": backend, "lengths": []}
    try:
        with context:
            attend(256)  # the libraries load
            for length in lengths:
                first, second = seconds_of(lambda n=length: attend(n)), seconds_of(lambda n=length: attend(n))
                row["lengths"].append({"length": length, "first_s": first, "second_s": second})
            steps = [(seconds_of(lambda n=n: attend(1, n)), seconds_of(lambda n=n: attend(1, n))) for n in keys]
    except RuntimeError as error:
        return {**row, "absent": str(error).splitlines()[0]}
    row["plan_s"] = statistics.median(x["first_s"] - x["second_s"] for x in row["lengths"])
    row["decode_plan_s"] = statistics.median(a - b for a, b in steps)
    longest = row["lengths"][-1]
    row["tflops"] = 3.5 * 2 * longest["length"] ** 2 * QUERIES * HEAD / longest["second_s"] / 1e12
    return row


def varlen_signature() -> str:
    """Return the signature of torch's attention over packed sequences, or "" where this torch has none."""
    import inspect

    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return ""
    return str(inspect.signature(varlen_attn))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/gpu_report_steps/attention.py --json attention.json",
    )
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--small", action="store_true", help="two short lengths")
    given = parser.parse_args(arguments)
    lengths, keys = ((33, 65), (1, 2)) if given.small else (LENGTHS, (1, 2, 3, 5, 9, 17, 31, 33, 47, 64))
    # Lengths of its own for each: what one row has seen, torch's choice in another would find built.
    rows = [measure(backend, tuple(n + i for n in lengths), keys) for i, backend in enumerate(BACKENDS)]
    says = [
        f"{x['backend']}: {x['absent']}"
        if "absent" in x
        else f"{x['backend']}: first − second call {1e3 * x['plan_s']:.1f} ms, decoding {1e3 * x['decode_plan_s']:.1f} "
        f"ms, {x['tflops']:.3g} TFLOP/s at {x['lengths'][-1]['length']} tokens"
        for x in rows
    ]
    return write(given.json, {"headline": says, "backends": rows, "varlen_attn": varlen_signature()})


if __name__ == "__main__":
    raise SystemExit(main())

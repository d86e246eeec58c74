"""Measures the peak memory of the log-probs with their gradient, over that of the same with all logits at once."""

from __future__ import annotations

import pathlib
import sys

from acceptance_matrix.cells import Cell
from acceptance_matrix.facts import HOST

SIZES = {"cuda": (16384, 62_000), "cpu": (2048, 32_000)}  # tokens, vocabulary


def measure(cell: Cell, fault: str, deadline_s: float, folder: pathlib.Path) -> dict:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "benchmarks"))
    import logprob

    tokens, vocab = SIZES[HOST.device_type]
    given = logprob.parse(["--tokens", str(tokens), "--vocab", str(vocab), "--dtype", cell.dtype, "--threads", "1"])
    whole = logprob.measure_memory("plain", given, tokens)
    lean = whole if fault == "whole-logits" else logprob.measure_memory("lean", given, tokens)
    return {"errors": {"memory": lean / whole}, "backend": HOST.backend, "lean_bytes": lean, "whole_bytes": whole}

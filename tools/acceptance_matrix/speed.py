"""Measures the time of the skip update over the dense one, at 75 % of the groups dead, by tools/benchmarks/skip.py."""

from __future__ import annotations

import pathlib
import statistics
import sys

from acceptance_matrix.cells import Cell
from acceptance_matrix.facts import HOST

DEAD_SHARE = 0.75
SIZES = {
    "cuda": "--hidden 1024 --layers 8 --vocab 32000 --mean-tokens 512 --max-tokens-per-microbatch 8192 --groups 32",
    "cpu": "--hidden 64 --layers 2 --vocab 512 --mean-tokens 64 --max-tokens-per-microbatch 256 --groups 16",
}
REPEATS = 3


def measure(cell: Cell, fault: str, deadline_s: float, folder: pathlib.Path) -> dict:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "benchmarks"))
    import skip

    given = skip.parse([*SIZES[HOST.device_type].split(), "--dtype", cell.dtype])
    backend = skip.build_backend(given)
    case = skip.make_case(backend, skip.make_batch(backend, given), DEAD_SHARE, given)
    if fault == "run-all":
        case.plans["train", "skip"] = case.plans["train", "dense"]
        case.batches["train", "skip"] = case.batches["train", "dense"]
    for repeat in range(REPEATS + 1):
        for name in ("dense", "skip"):
            skip.update_once(backend, case, name, keep=repeat > 0)
    seconds = {name: statistics.median(update for update, _ in case.updates[name]) for name in case.updates}
    backend.close(leave_world=False)
    return {"errors": {"speed": seconds["skip"] / seconds["dense"]}, "backend": HOST.backend, "update_s": seconds}

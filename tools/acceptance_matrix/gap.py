"""Measures the largest difference of an engine's log-probs from the trainer's in a short run that has them equal."""

from __future__ import annotations

import pathlib

from acceptance_matrix.cells import Cell
from acceptance_matrix.facts import HOST
from acceptance_matrix.rollout import run_rows

GAP = "train/logprob_gap_max"


def measure(cell: Cell, fault: str, deadline_s: float, folder: pathlib.Path) -> dict:
    gaps = [row.get(GAP, float("nan")) for row in run_rows(cell, deadline_s, folder)]
    return {"errors": {"gap": max(gaps)}, "backend": HOST.backend}

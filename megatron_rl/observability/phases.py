"""Names the phases of a run's optimizer steps, and divides its rows into the supervised ones and the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from megatron_rl.observability.metrics import Row

WARMUP, SFT, PREFERENCE, RL = "warmup", "sft", "preference", "rl"
SUPERVISED = frozenset({WARMUP, SFT, PREFERENCE})
TITLES = {WARMUP: "supervised start", SFT: "SFT", PREFERENCE: "preference", RL: "RL"}


def is_supervised(row: Row) -> bool:
    return row["phase"] in SUPERVISED


def title(phase: str) -> str:
    """Return a phase's name on a page or in a table; a phase of other programs keeps its own."""
    return TITLES.get(phase, phase)


def split_start(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return (the supervised steps that precede others, the run's own steps).

    A run of supervised steps alone precedes nothing: all are its own.

    Example: rows of the phases ``warmup warmup rl`` give two and one; ``sft sft`` give none and two.
    """
    own = [row for row in rows if not is_supervised(row)]
    return ([row for row in rows if is_supervised(row)], own) if own else ([], list(rows))


def in_phases(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Return the rows of each stretch of one phase, under the phase's name."""
    return [(str(phase), list(part)) for phase, part in groupby(rows, key=lambda row: row["phase"])]

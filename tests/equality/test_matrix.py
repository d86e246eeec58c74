"""Every topology equals the single process: log-probs, gradients, their norm, and weights after three AdamW steps."""

import dataclasses

import pytest

from tests.equality.matrix import BOUND, CELLS, measure
from tests.pairwise import quick

BY_NAME = {f"{cell.name}-{family}": (cell, family) for cell in CELLS for family in cell.families}
# One of a cell's families in turn, of two processes; the mixtures' other cells of two are in test_experts.py, and
# interleaved stages, of different numbers of layers, in test_uneven_pipeline.py.
QUICK = [f"{cell.name}-{cell.families[number % len(cell.families)]}"
         for number, cell in enumerate(CELLS)
         if cell.world <= 2 and cell.name not in ("TP2", "EP2", "PP2·VPP2", "TP2·SP·EP2, expert TP 1")]


@pytest.mark.parametrize("name", quick(BY_NAME, *QUICK))
def test_topology_equals_the_single_process(pool, name):
    """The quick cells have two layers where the stages want no more, the others the table's four."""
    cell, family = BY_NAME[name]
    if name in QUICK and "VPP" not in name:
        cell = dataclasses.replace(cell, layers=2)
    found = pool.run(cell.world, measure, cell, family, timeout_s=120)[0]
    assert len(found) == 10, sorted(found)  # 2 log-probs, 4 gradients, 2 norms, 2 weights
    assert max(found.values()) < BOUND, found

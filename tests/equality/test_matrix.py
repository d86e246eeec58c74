"""Every topology equals the single process: log-probs, gradients, their norm, and weights after three AdamW steps."""

from __future__ import annotations

import pytest

from tests.equality.matrix import BOUND, CELLS, measure, worst

# Four processes on two cores: a cell takes five to ten seconds. Of two processes, every cell with one of its families.
QUICK = {cell.name: cell.families[number % len(cell.families)] for number, cell in enumerate(CELLS) if cell.world <= 2}
CASES = [
    pytest.param(
        cell, family, id=f"{cell.name}-{family}", marks=[] if QUICK.get(cell.name) == family else [pytest.mark.long]
    )
    for cell in CELLS
    for family in cell.families
]


@pytest.mark.parametrize(("cell", "family"), CASES)
def test_topology_equals_the_single_process(pool, cell, family):
    found = pool.run(cell.world, measure, cell, family, timeout_s=120)[0]
    print(cell.name, family, worst(found))
    assert len(found) == 10, sorted(found)  # 2 log-probs, 4 gradients, 2 norms, 2 weights
    assert max(found.values()) < BOUND, found

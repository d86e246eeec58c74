"""Gated delta nets equal transformers' in every layout: log-probs, gradients of skip and dense, norms and steps."""

import numpy as np
import pytest
import torch

from tests.equality.layouts import TOLERANCE
from tests.equality.matrix import BOUND, Cell, measure
from tests.equality.rig import config_of, layers_of
from tests.equality.rows import measured
from tests.pairwise import quick

DENSE, NEXT, MIXTURE = "qwen3_5_text", "qwen3_next", "qwen3_5_moe_text"
QUICK = (f"one {DENSE}", f"TP2-SP {NEXT}", f"PP2 {DENSE}", f"CP2 {MIXTURE}", f"EP2 {MIXTURE}", f"TP2 {DENSE}")
LAYOUTS = ("PP2-VPP2", "CP2", "DP2", "TP2-PP2", "TP2-SP", "TP2-SP-CP2", "CP2-recompute", "PP2-recompute")
OF_EXPERTS = ("one", "PP2", "EP2-PP2", "TP2-SP-EP2", "EP2-PP2-VPP2", "EP2-recompute")
LARGE = (*(f"{layout} {DENSE}" for layout in LAYOUTS),
         *(f"{layout} {family}" for layout in OF_EXPERTS for family in (NEXT, MIXTURE)))


def against_transformers(rank: int, world: int, family: str, overrides: tuple[str, ...]) -> dict[str, float]:
    """Measure a row as a cell of the matrix (tests/equality/matrix.py)."""
    layers = layers_of(config_of(*overrides))
    return measure(rank, world, Cell(name=family, world=world, parallel=(), extra=overrides, layers=layers), family, ())


@pytest.mark.parametrize("name", quick((*QUICK, *LARGE), *QUICK))
def test_delta_nets_equal_transformers(pool, name):
    found = measured(pool, name, against_transformers)[0]
    assert max(found.values()) < BOUND and len(found) == 10, found

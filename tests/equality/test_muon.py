"""Muon over whole matrices equals a plain loop with a plain Newton–Schulz iteration in every layout."""

import pytest

from tests.equality.muon_rig import against_plain
from tests.equality.rows import measured
from tests.pairwise import quick

LAYOUTS = ("one qwen2_untied", "PP2 qwen2_tied", "TP2 qwen2_untied", "DP2 qwen2_tied")


@pytest.mark.parametrize("name", LAYOUTS)
def test_muon_equals_the_plain_loop(pool, name):
    found = measured(pool, name, against_plain)[0]
    print(name, found)
    assert len(found) == 3 and max(found["norm"], found["weights"]) < 1e-5, found

"""A run that is killed at random moments is started again, by the study's own code.

30 kills and their table: docs/checkpoints.md.
"""

from __future__ import annotations

import pytest

from tests.faults.kill_study import study


@pytest.mark.long(seconds=70)
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["PP2", "DP2-KL", "PP2-KL-device"])
def test_a_killed_run_started_again_ends_with_the_same_bits(nursery, tmp_path, layout):
    """A killed run that is started again ends with the same bits.

    It has pipeline stages, and a reference that is renewed under an adaptive coefficient; every attempt is bounded by
    the study (BOUND_S).
    """
    _, outcomes = study(nursery, 4, 1, layout, tmp_path)
    assert len(outcomes) == 4 and not any(outcome.differs for outcome in outcomes), outcomes

"""The check of rollout.bitwise: one differing bit is found, and named by sample and position."""

import numpy as np
import pytest

from megatron_rl.algorithm.bitwise import require_equal
from megatron_rl.errors import EngineError

LENGTHS = np.array([2, 3, 0, 4])
IDS = ("a#0", "a#1", "b#0", "b#1")


def drawn() -> np.ndarray:
    return np.random.default_rng(0).normal(-2, 1, 9).astype(np.float32)


def test_equal_log_probs_have_no_gap_tokens_without_loss_are_not_compared_and_nan_equals_nothing() -> None:
    assert require_equal(drawn(), drawn(), np.ones(9, dtype=bool), LENGTHS, IDS) == 0.0
    nothing = np.zeros(0, dtype=np.float32)
    assert require_equal(nothing, nothing, nothing > 0, np.zeros(0, dtype=np.int64), ()) == 0.0
    engine, mask = drawn(), np.ones(9, dtype=bool)
    engine[3], mask[3] = 7.0, False
    assert require_equal(drawn(), engine, mask, LENGTHS, IDS) == 0.0
    both = np.where(np.arange(9) == 8, np.float32(np.nan), drawn())
    with pytest.raises(EngineError, match="b#1, position 3"):
        require_equal(both, both.copy(), mask, LENGTHS, IDS)


@pytest.mark.parametrize("place", range(9))
def test_one_bit_is_found_and_named(place: int) -> None:
    engine = drawn()
    engine[place] = np.nextafter(engine[place], np.float32(0))
    sample, position = [(i, t) for i, n in enumerate(LENGTHS) for t in range(n)][place]
    with pytest.raises(EngineError, match=rf"sample {IDS[sample]}, position {position} of its response.*1 such of 9"):
        require_equal(drawn(), engine, np.ones(9, dtype=bool), LENGTHS, IDS)
    with pytest.raises(EngineError, match=rf"sample index {sample}, position {position} "):
        require_equal(drawn(), engine, np.ones(9, dtype=bool), LENGTHS, ())

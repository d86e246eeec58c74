"""algorithm/distillation.py against a loop over tokens, and what it refuses."""

import numpy as np
import pytest

from megatron_rl.algorithm.distillation import distillation_advantages
from megatron_rl.errors import NonFiniteAdvantage


def naive(student, teacher, mask, lengths, discount: float) -> list[float]:
    """Return each token's discounted sum of later gaps, sample by sample and from its end."""
    found, start = [], 0
    for length in lengths:
        own, following = [], 0.0
        for t in reversed(range(start, start + length)):
            if mask[t]:
                following = float(teacher[t]) - float(student[t]) + discount * following
            own.append(following if mask[t] else 0.0)
        found += reversed(own)
        start += length
    return found


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_advantages_equal_a_loop(seed: int, discount: float) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 9, 6)
    student, teacher = random.normal(-2, 1, (2, lengths.sum())).astype(np.float32)
    mask = random.random(lengths.sum()) < 0.7
    found = distillation_advantages(student, teacher, mask, lengths, discount=discount)
    np.testing.assert_allclose(found, naive(student, teacher, mask, lengths, discount), rtol=1e-12, atol=1e-12)
    assert not distillation_advantages(student, student, mask, lengths, discount=discount).any()


def test_worked_example_and_a_token_that_the_teacher_rules_out() -> None:
    student, mask, lengths = np.array([-1.0, -2.0]), np.ones(2, dtype=bool), np.array([2])
    for discount, wanted in ((0.0, [-0.5, 1.0]), (1.0, [0.5, 1.0])):
        found = distillation_advantages(student, np.array([-1.5, -1.0]), mask, lengths, discount=discount)
        assert found.tolist() == wanted
    with pytest.raises(NonFiniteAdvantage, match="of sample a#0 is -inf"):
        distillation_advantages(student, np.array([-np.inf, -1.0]), mask, lengths, discount=0.0, sample_ids=("a#0",))

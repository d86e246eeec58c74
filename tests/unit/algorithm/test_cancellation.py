"""algorithm/cancellation.py: a sum of standardised rewards that is 0 in exact arithmetic is 0, and no other is."""

from fractions import Fraction

import numpy as np
import pytest

from megatron_rl.algorithm.advantage import advantages
from megatron_rl.algorithm.cancellation import RootSums
from megatron_rl.algorithm.estimators import GroupRewards

BASE = np.array([0.1, 0.7, 0.2, 0.9, 0.45])


def gdpo_of(*functions, weights: tuple[float, ...] = (1.0, 1.0), epsilon: float = 1e-6) -> np.ndarray:
    """Return the advantages under gdpo of one group, by the rewards of each function."""
    by_function = np.stack([np.asarray(values, dtype=np.float64) for values in functions], axis=1)
    rewards = GroupRewards(totals=np.zeros(len(by_function)), groups=np.zeros(len(by_function), dtype=np.int64),
                           included=np.ones(len(by_function), dtype=bool), by_function=by_function,
                           function_weights=weights)
    return advantages(rewards, estimator="gdpo", epsilon=epsilon)


@pytest.mark.parametrize(("functions", "weights", "epsilon"), [
    ([BASE, [0.9, 0.3, 0.8, 0.1, 0.55]], (1.0, 1.0), 1e-6),  # r and 1 − r
    ([BASE, [0.9, 0.3, 0.8, 0.1, 0.55]], (0.7, 0.7), 0.0),
    ([BASE, BASE, BASE], (0.1, 0.2, -0.3), 1e-6),  # decimals that add up to 0
    ([BASE, [-0.7, -4.9, -1.4, -6.3, -3.15]], (1.0, 1.0), 0.0),  # −7 r
    ([BASE, 1e6 - 10 * BASE], (3.0, 3.0), 0.0),  # a large mean rounds more
    ([[1, 2, 4], [1, 2, 9], [4, 3, 1], [9, 8, 1]], (1.0, 2.0, 1.0, 2.0), 1e-3),  # two pairs of unlike deviations
])
def test_functions_that_cancel_give_advantages_of_exactly_0(functions, weights, epsilon) -> None:
    assert (gdpo_of(*functions, weights=weights, epsilon=epsilon) == 0.0).all()
    shifted = [np.add(functions[0], [0.0] * (len(functions[0]) - 1) + [1e-3]), *functions[1:]]
    assert (gdpo_of(*shifted, weights=weights, epsilon=epsilon) != 0.0).any()


def test_functions_may_cancel_on_some_samples_alone_and_a_tiny_sum_that_is_not_0_is_signal() -> None:
    """Two mirror each other around 0.4 on the first two samples; a third that applies elsewhere has no part there."""
    found = gdpo_of([0.1, 0.7, 0.3, 0.4, 0.5], [0.7, 0.1, 0.4, 0.3, 0.5])
    assert (found == 0.0).tolist() == [True, True, False, False, False]
    found = gdpo_of([0.2, 0.9, 0.4, np.nan], [0.9, 0.2, 0.7, np.nan], [np.nan, np.nan, 1.0, 0.0], weights=(1.0,) * 3)
    assert (found == 0.0).tolist() == [True, True, False, False]
    # ε weighs on the function r twice as much as on 2 · (1 − r), so that their sum is some 1e-6
    mirrored = np.array([1.8, 0.6, 1.6, 0.2, 1.1])
    assert (gdpo_of(BASE, mirrored, epsilon=1e-6) != 0.0).all()
    assert (gdpo_of(BASE, mirrored, epsilon=0.0) == 0.0).all()


@pytest.mark.parametrize(("terms", "cancels"), [
    ([], True),
    ([(1, 2), (-1, 2)], True),
    ([(1, 2), (1, 3), (Fraction(-1, 2), 8), (Fraction(-1, 3), 27)], True),
    ([(1, 2), (1, 3), (-1, 5)], False),  # 1.41 + 1.73 is not 2.24
    ([(1, 1), (1, 4), (-1, 9)], True),
    ([(1, 10**40 + 1), (-1, 10**40)], False),  # equal in floating point
    ([(1, Fraction(1, 2)), (Fraction(-1, 2), 2)], True),
])
def test_sums_of_roots(terms, cancels) -> None:
    sums = RootSums(2)
    for factor, square in terms:
        sums.add(Fraction(factor), np.array([3, 0], dtype=object), Fraction(square))
    assert sums.are_zero().tolist() == [cancels, True]

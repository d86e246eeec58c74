"""Exact arithmetic that decides whether a sum is 0, where floating point may leave a rounding error.

Invariants (tests/unit/algorithm/test_cancellation.py):

1. A sum is reported as 0 if and only if it is 0 in exact arithmetic, whatever its floating-point
   value is.
2. Numbers are read in two ways: as the binary numbers that they are, and as the decimals that they
   print as. A sum counts as 0 if it is 0 in either reading. With weights (0.1, 0.2, −0.3) the user
   meant numbers that add up to 0, though the binary numbers do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

READINGS: tuple[Callable[[float], Fraction], ...] = (Fraction, lambda value: Fraction(repr(value)))


class RootSums:
    """Holds n sums of terms q · √v with rational q and v > 0, and tells exactly which of the sums are 0.

    Two square roots are in one class if their ratio is rational. Roots of different classes are
    linearly independent over the rational numbers (Besicovitch 1940, doi:10.1112/jlms/s1-15.1.3).
    So a sum is 0 if and only if its terms of each class add up to 0.

    count: n, the number of sums.

    Example: √2 + √3 − √8/2 − √27/3 is 0. √2 and √8 are of one class, √3 and √27 of another.
    """

    def __init__(self, count: int) -> None:
        self._classes: dict[Fraction, np.ndarray] = {}
        self._count = count

    def add(self, factor: Fraction, multiples: np.ndarray, square: Fraction) -> None:
        """Add the term factor · multiples[i] · √square to sum i, for each of the n sums.

        multiples: [n] Python integers in an array of dtype object.
        """
        for of_class, sums in self._classes.items():
            ratio = rational_root(square / of_class)
            if ratio is not None:
                sums += multiples * (factor * ratio)
                return
        self._classes[square] = multiples * factor

    def are_zero(self) -> np.ndarray:
        """Return bool [n], True for each sum that is 0."""
        zero = np.ones(self._count, dtype=bool)
        for sums in self._classes.values():
            zero &= sums == 0
        return zero


def rational_root(square: Fraction) -> Fraction | None:
    """Return the square root of a number if it is rational, else None."""
    root = Fraction(math.isqrt(square.numerator), math.isqrt(square.denominator))
    return root if root * root == square else None


def standardised_rewards_cancel(columns: Sequence[np.ndarray], weights: Sequence[float], epsilon: float) -> np.ndarray:
    """Return bool [n]: whether Σ_f w_f · (r_i^f − mean^f) / (std^f + ε) is 0, for the n samples of one group.

    columns: float64 [n] for each function, NaN for a sample that the function did not apply to.
    weights: w_f of each function.
    epsilon: ε, at least 0.

    Example: two functions of equal weight gave three samples the rewards (0.1, 0.4, 1.0) and
    (0.9, 0.6, 0.0) → (True, True, True).
    """
    cancels = np.zeros(len(columns[0]), dtype=bool)
    for exact in READINGS:
        sums = RootSums(len(cancels))
        for column, weight in zip(columns, weights, strict=True):
            applied = np.flatnonzero(~np.isnan(column))
            unit, centred = _centred([exact(value) for value in column[applied].tolist()])
            if not any(centred):
                continue
            multiples = np.zeros(len(column), dtype=object)
            multiples[applied] = centred
            variance = unit * unit * sum(each * each for each in centred) / (len(centred) - 1)
            for factor, square in _reciprocal(variance, exact(float(epsilon))):
                sums.add(exact(float(weight)) * unit * factor, multiples, square)
        cancels |= sums.are_zero()
    return cancels


def _centred(values: list[Fraction]) -> tuple[Fraction, list[int]]:
    """Return (unit, integers [n]) such that integers[i] · unit is values[i] less the mean of all n values."""
    denominator = math.lcm(*(value.denominator for value in values))
    integers = [value.numerator * (denominator // value.denominator) for value in values]
    total = sum(integers)
    return Fraction(1, denominator * max(len(values), 1)), [len(values) * each - total for each in integers]


def _reciprocal(variance: Fraction, epsilon: Fraction) -> list[tuple[Fraction, Fraction]]:
    """Return 1 / (√variance + ε) as terms q · √s, each a pair (q, s)."""
    deviation = rational_root(variance)
    if deviation is not None:
        return [(1 / (deviation + epsilon), Fraction(1))]
    # 1 / (√v + ε) = (√v − ε) / (v − ε²), and v is not ε², since √v is not rational.
    scale = 1 / (variance - epsilon * epsilon)
    return [(scale, variance), (-scale * epsilon, Fraction(1))]

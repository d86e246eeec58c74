"""Chooses the part of a product of factors that ``make test`` runs; the rest of it is marked ``long``.

A fault hides in a value, or in two values that do not go together; three that do so only together have not been met
here. So ``make test`` runs every pair of values once, and ``make test-long`` what is left of the product.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

import pytest


def covering(factors: Sequence[Sequence[object]], strength: int) -> list[tuple[int, ...]]:
    """Choose rows of the product that hold every combination of ``strength`` factors' values at least once.

    A row is a tuple of positions. The choice is greedy: each time the row that covers the most of what is not covered
    yet, the first of those. Example: two values in each of three factors, strength 2: 4 of the 8 rows.
    """
    rows = list(itertools.product(*(range(len(values)) for values in factors)))
    places = list(itertools.combinations(range(len(factors)), strength))

    def combinations(row: tuple[int, ...]) -> set[tuple]:
        return {(place, tuple(row[i] for i in place)) for place in places}

    missing, chosen = set().union(*(combinations(row) for row in rows)), []
    while missing:
        best = max(rows, key=lambda row: len(combinations(row) & missing))
        chosen.append(best)
        missing -= combinations(best)
    return chosen


def pairwise(
    *factors: Iterable[object], strength: int = 2, ids: Callable[[object], str] = str, kept: Collection[tuple] = ()
) -> list:
    """Return the whole product as pytest's parameters; those beyond the covering rows are marked ``long``.

    strength: 2 for every pair of values, 1 for every value. ids: the name of a value. kept: rows that are chosen by
    hand instead.
    """
    lists = [list(values) for values in factors]
    if kept:
        quick = {tuple(values.index(value) for values, value in zip(lists, row, strict=True)) for row in kept}
    else:
        quick = set(covering(lists, strength))
    found = []
    for row in itertools.product(*(range(len(values)) for values in lists)):
        values = [each[i] for each, i in zip(lists, row, strict=True)]
        marks = [] if row in quick else [pytest.mark.long]
        found.append(pytest.param(*values, marks=marks, id="-".join(ids(value) for value in values)))
    return found


def quick(cases: Iterable[object], *kept: object) -> list:
    """Return ``cases`` as pytest's parameters; those that are not among ``kept`` are marked ``long``.

    Raises ValueError where ``kept`` holds one that is none of the cases.
    """
    cases = list(cases)
    if strangers := [case for case in kept if case not in cases]:
        raise ValueError(f"{strangers} are none of the cases {cases}")
    return [case if case in kept else pytest.param(case, marks=pytest.mark.long) for case in cases]

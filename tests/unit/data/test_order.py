"""Checks data/order.py: the order of one source to the sample, and the shares and the reproducibility of a mixture."""

import collections

import numpy as np
import pytest

from megatron_rl.data.order import Order, shares


def drawn(order: Order, count: int, start: int = 0) -> list[tuple[int, int]]:
    return [order.at(position) for position in range(start, start + count)]


def order_of(sizes, weights=(), *, seed=3, shuffle=True) -> Order:
    sources = [np.arange(end - size, end) for size, end in zip(sizes, np.cumsum(sizes), strict=True)]
    return Order(sources, weights, seed=seed, shuffle=shuffle)


def test_the_order_of_one_source_is_that_of_every_earlier_release():
    """Written down from the release before mixtures: a run resumed from its checkpoint goes on with the same rows."""
    wanted = {0: [(0, 0), (5, 0), (1, 0), (6, 0), (2, 0), (4, 0), (3, 0), (2, 1), (0, 1), (4, 1), (1, 1), (5, 1)],
              -5: [(2, 0), (1, 0), (4, 0), (3, 0), (6, 0), (5, 0), (0, 0), (4, 1), (3, 1), (1, 1), (6, 1), (5, 1)]}
    for seed, rows in wanted.items():
        assert drawn(order_of([7], seed=seed), 12) == rows
        assert drawn(order_of([3, 4], seed=seed), 12) == rows  # several files without weights are one source
        assert drawn(order_of([7], [0.3], seed=seed), 12) == rows
    assert order_of([3, 4]).identity() == {}


@pytest.mark.parametrize(
    ("weights", "total", "counts"),
    [((3, 1), 6, [5, 1]), ((1, 1), 7, [4, 3]), ((0.7, 0.3), 10, [7, 3]), ((1, 1e-9), 5, [5, 0]), ((2.0,), 3, [3])],
)
def test_shares_are_the_nearest_whole_numbers(weights, total, counts):
    assert shares(weights, total) == counts


@pytest.mark.parametrize("shuffle", [True, False])
def test_any_stretch_of_a_mixture_holds_its_shares(shuffle):
    order = order_of([20, 60, 20], [1, 1, 2], shuffle=shuffle)
    assert (len(order), order.counts) == (100, [25, 25, 50])
    sources = [int(row >= 20) + int(row >= 80) for row, _ in drawn(order, 300)]
    for start in range(0, 280, 7):
        of_20 = collections.Counter(sources[start : start + 20])
        assert all(abs(of_20[source] - 20 * share) <= 2 for source, share in enumerate((0.25, 0.25, 0.5)))


@pytest.mark.parametrize("shuffle", [True, False])
def test_no_row_of_a_mixture_comes_again_before_its_sources_others(shuffle):
    order = order_of([5, 12], [2, 1], shuffle=shuffle)
    rows = drawn(order, 10 * len(order))
    assert len(set(rows)) == len(rows)  # (row, round) never twice: prompt ids, and so seeds, are distinct
    for first, size in ((0, 5), (5, 12)):
        of_source = [pair for pair in rows if first <= pair[0] < first + size]
        for rounds in range(len(of_source) // size):
            stretch = of_source[rounds * size : (rounds + 1) * size]
            assert sorted(stretch) == [(row, rounds) for row in range(first, first + size)]


def test_a_mixture_is_a_function_of_seed_and_position():
    whole = drawn(order_of([5, 12], [2, 1]), 60)
    assert drawn(order_of([5, 12], [2, 1]), 23) + drawn(order_of([5, 12], [2, 1]), 37, start=23) == whole
    assert whole[::-1] == [order_of([5, 12], [2, 1]).at(i) for i in range(59, -1, -1)]
    assert drawn(order_of([5, 12], [2, 1], seed=4), 60) != whole
    assert order_of([5, 12], [2, 1]).identity() == {"sources": [[5, 11], [12, 6]]}


def test_the_order_of_a_mixture_stays_what_it_is():
    """Written down at its first release, so that a checkpoint's position means the same rows in every later one."""
    order = order_of([3, 3], [2, 1])
    assert order.counts == [4, 2]
    assert drawn(order, 12) == [*((0, 0), (4, 0), (1, 0), (2, 0), (3, 0), (1, 1)),
                                *((2, 1), (5, 0), (0, 1), (0, 2), (3, 1), (1, 2))]
    assert [int(row >= 4) for row, _ in drawn(order_of([4, 4], [1, 3]), 8)] == [1, 0, 1, 1, 1, 0, 1, 1]

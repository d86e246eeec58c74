"""Checks tests/pairwise.py: the rows that `make test` keeps hold every pair, and nothing of the product is lost."""

from __future__ import annotations

import itertools

import pytest

from tests.pairwise import covering, pairwise, quick


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 4), (2, 5), (4,), (2, 2, 2, 3)])
def test_every_pair_of_values_is_in_a_row(sizes):
    factors = [range(size) for size in sizes]
    strength = min(2, len(sizes))
    rows = covering(factors, strength)
    for place in itertools.combinations(range(len(sizes)), strength):
        wanted = set(itertools.product(*(range(sizes[i]) for i in place)))
        assert {tuple(row[i] for i in place) for row in rows} == wanted
    assert len(rows) == len(set(rows)) <= len(list(itertools.product(*factors)))


def test_the_product_is_whole_the_rest_is_long_and_a_case_that_is_not_there_cannot_be_kept():
    found = pairwise("ab", "cd", "ef")
    assert [x.id for x in found] == ["-".join(row) for row in itertools.product("ab", "cd", "ef")]
    assert sum(not x.marks for x in found) == 4 and all(x.marks[0].name == "long" for x in found if x.marks)

    # every value once is as many rows as the longest factor has
    assert sum(not x.marks for x in pairwise("abc", "de", strength=1)) == 3
    with pytest.raises(ValueError, match="'c'"):
        quick("ab", "c")
    assert [x if isinstance(x, str) else x.marks[0].name for x in quick("abc", "b")] == ["long", "b", "long"]

"""The pool fixture, and the mark that comes with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Gloo workers for the whole session; see tests/distributed/pool.py."""
    with Pool() as workers:
        yield workers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What uses the pool is a distributed test, marked or not."""
    for item in items:
        if "pool" in item.fixturenames:
            item.add_marker("distributed")

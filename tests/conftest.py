"""The pool fixture, and the mark that comes with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.distributed.nursery import Nursery
from tests.distributed.pool import Pool

# Hypothesis's own clocks, off: a deadline for each example, and a complaint about slow drawing. On a loaded host both are met by chance.
settings.register_profile("clockless", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("clockless")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """A process that has imported everything, to fork from; see tests/distributed/nursery.py."""
    with Nursery() as forks:
        yield forks


@pytest.fixture(scope="session")
def pool(nursery: Nursery) -> Iterator[Pool]:
    """Gloo workers for the whole session; see tests/distributed/pool.py."""
    with Pool(nursery=nursery) as workers:
        yield workers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark a test that uses the pool as distributed, and one that uses the nursery as starting processes."""
    for item in items:
        for fixture, mark in (("pool", "distributed"), ("nursery", "process")):
            if fixture in item.fixturenames:
                item.add_marker(mark)

"""The fixtures of a whole session, each built once, and the marks that come with them."""

import gc
import pathlib
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.workers.nursery import Nursery
from tests.workers.pool import Pool

# Hypothesis's own clocks, off: a deadline for each example, and a complaint about slow drawing. On a loaded host both
# are met by chance.
settings.register_profile("clockless", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("clockless")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Start a process that has imported everything, to fork from; see tests/workers/nursery.py."""
    with Nursery() as forks:
        yield forks


@pytest.fixture(scope="session")
def pool(nursery: Nursery) -> Iterator[Pool]:
    """Start gloo workers for the whole session; see tests/workers/pool.py."""
    with Pool(nursery=nursery) as workers:
        yield workers


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory) -> pathlib.Path:
    """Make a folder with data, tokenizer and a model of two layers, which no test writes to."""
    from tests.workers.inputs import prepare_inputs

    return prepare_inputs(tmp_path_factory.mktemp("arithmetic"), hidden=64, layers=2, heads=2, intermediate=96)


@pytest.fixture(scope="session")
def mixture(arithmetic, tmp_path_factory) -> pathlib.Path:
    """Make a folder with the same data and tokenizer, and with a mixture of experts as the model."""
    from tests.workers.inputs import prepare_mixture

    return prepare_mixture(arithmetic, tmp_path_factory.mktemp("mixture"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use the pool or the nursery, and put the longest tests first.

    A test that uses the pool is marked as distributed, one that uses the nursery as starting processes.

    ``long(seconds=N)`` says that a test takes about so many seconds on two cores with nothing else to do. A lane that
    began with the longest tests ends with the others.
    """
    for item in items:
        for fixture, mark in (("pool", "distributed"), ("nursery", "process")):
            if fixture in item.fixturenames:
                item.add_marker(mark)
    items.sort(key=lambda item: -max((mark.kwargs.get("seconds", 0) for mark in item.iter_markers("long")), default=0))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave what is imported and collected to no collection of garbage, now or later: it lives until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()

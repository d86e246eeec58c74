"""The workers that find a stand-in of Transformer Engine, which several files share."""

from collections.abc import Iterator

import pytest

from tests.equality.engine_rig import engine_workers
from tests.workers.pool import Pool


@pytest.fixture(scope="package")
def engine_pool() -> Iterator[Pool]:
    """Start workers with the newest Transformer Engine."""
    with engine_workers("2.20.2") as workers:
        yield workers

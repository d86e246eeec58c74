"""The batches of every equation's tests, by seed."""

import pytest

from tests.oracles.batch import SEEDS, Batch, random_batch


@pytest.fixture(params=SEEDS)
def seed(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def batch(seed: int) -> Batch:
    return random_batch(seed)


@pytest.fixture
def holed(seed: int) -> Batch:
    """Draw a batch of which one sample has no loss token."""
    return random_batch(seed, num_empty=1)

"""The server of a session, behind its door, and workers that know it by their environment alone."""

import os
from collections.abc import Iterator

import pytest

from tests.s3.server import Door, environment, s3_server
from tests.workers.nursery import Nursery


@pytest.fixture(scope="session")
def s3() -> Iterator[Door]:
    with s3_server() as port:
        door = Door(port)
        os.environ.update(environment(door.port))
        yield door
        door.close()


@pytest.fixture(scope="session")
def nursery(s3) -> Iterator[Nursery]:
    with Nursery() as forks:
        yield forks


@pytest.fixture
def door(s3) -> Iterator[Door]:
    """Give the door, opened again behind the test."""
    yield s3
    s3.open()

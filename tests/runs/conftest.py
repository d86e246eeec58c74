"""The runs that several tests of this room read, each made once."""

import pathlib

import pytest

from tests.runs.command import Made


@pytest.fixture(scope="session")
def made(pool, arithmetic: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(pool, arithmetic, tmp_path_factory.mktemp)

"""Fixtures of the tests of rewards."""

import pytest

from megatron_rl.reward import pool as pool_module
from tests.unit.reward.rig import OnlyEndless


@pytest.fixture
def only_endless(monkeypatch) -> None:
    """Let deadlines reach only the samples that never end, however loaded the host is."""
    monkeypatch.setattr(pool_module, "WorkerProcess", OnlyEndless)

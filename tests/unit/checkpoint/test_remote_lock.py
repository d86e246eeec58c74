"""The lock of a store's folder: one run at a time, taken over from a run that is gone, on this host or another."""

import json

import pytest

from megatron_rl.checkpoint import remote_lock
from megatron_rl.checkpoint.remote_lock import RemoteLock, held_store, look_at_store
from megatron_rl.distributed import run_lock
from megatron_rl.errors import ConfigError
from megatron_rl.storage.location import location
from tests.patience import HANG_S, until


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Give an empty folder of memory://, and a lock that beats and settles in no time."""
    monkeypatch.setattr(remote_lock, "SETTLE_S", 0.01)
    for name, seconds in {"BEAT_S": 0.01, "STALE_S": HANG_S, "POLL_S": 0.01}.items():
        monkeypatch.setattr(run_lock, name, seconds)
    place = location(f"memory://{tmp_path.name}")
    yield place
    place.remove_tree()


def number_of(root) -> int:
    return json.loads((root / "lock.json").read_bytes())["number"]


@pytest.mark.parametrize("far", [False, True], ids=["this host", "another host"])
def test_a_second_run_is_refused_while_the_first_lives(root, monkeypatch, far: bool) -> None:
    if far:
        monkeypatch.setattr(run_lock, "_lives_here", lambda holder: None)
    with held_store(root, is_first=True):
        begun = number_of(root)
        assert until(lambda: number_of(root) > begun + 2)
        for enter in (lambda: RemoteLock(root).acquire(), lambda: look_at_store(root)):
            with pytest.raises(ConfigError, match="is in use by another run .*name another checkpoint.dir"):
                enter()
    assert root.files() == {}
    look_at_store(root)


def test_a_lock_that_stands_still_is_taken_over_and_its_holder_told(root, monkeypatch) -> None:
    monkeypatch.setattr(run_lock, "_lives_here", lambda holder: None)
    monkeypatch.setattr(run_lock, "STALE_S", 0.3)
    told: list[str] = []
    first = RemoteLock(root, lost=told.append)
    assert first._created()  # and never beats
    second = RemoteLock(root)
    second.acquire()
    first.beat()
    assert second._is_mine() and "another run" in told[0]
    first.release()
    assert second._is_mine()
    second.release()
    assert root.files() == {}


def test_other_ranks_hold_nothing(root) -> None:
    with held_store(root, is_first=False):
        assert root.files() == {}


def test_a_store_that_refuses_is_said_by_its_setting(root, monkeypatch) -> None:
    def refuse(*_, **__) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(root.system, "open", refuse)
    said = r"^checkpoint.dir='memory://.*cannot be written: .*the store refuses it: Access Denied"
    with pytest.raises(ConfigError, match=said), held_store(root, is_first=True):
        pass

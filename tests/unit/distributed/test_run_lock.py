"""Checks distributed/run_lock.py: one run in a folder at a time, and none kept out by a run that is gone."""

import functools
import json
import os
import pathlib
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from megatron_rl.distributed import run_lock
from megatron_rl.distributed.run_lock import LOCK, LockReader, RunLock, machine, started_ticks
from megatron_rl.errors import ConfigError
from tests.patience import patient, until


def holder_of(folder: pathlib.Path, **changes) -> pathlib.Path:
    """Write a lock as another process would hold it; by default a living one of this machine: the tests' parent."""
    pid = changes.pop("pid", os.getppid())
    facts = {"host": "here", "machine": machine(), "pid": pid, "started_ticks": started_ticks(pid), "token": "theirs"}
    path = folder / LOCK
    path.write_text(json.dumps(facts | changes))
    return path


def take_and_leave(folder: pathlib.Path) -> None:
    lock = RunLock(folder)
    lock.acquire()
    lock.release()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(run_lock, "SETTLE_S", 0.01)


def test_a_second_run_is_refused_until_the_first_has_left(tmp_path):
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.acquire()
    with pytest.raises(ConfigError, match=f"in use by another run .process {os.getpid()} on .* run.dir"):
        second.acquire()
    second.release()  # which held nothing
    assert (tmp_path / LOCK).exists()
    first.release()
    take_and_leave(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_was_killed_holds_it_no_more_reaped_or_not(tmp_path, quick):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        holder_of(tmp_path, pid=child.pid)
        with pytest.raises(ConfigError):
            RunLock(tmp_path).acquire()
    finally:
        child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and a zombie
    assert started_ticks(child.pid) is None
    take_and_leave(tmp_path)
    child.wait(patient(10))


def test_a_living_process_holds_it_without_a_beat_and_another_of_the_same_id_does_not(tmp_path, quick):
    holder_of(tmp_path)
    with pytest.raises(ConfigError, match=f"process {os.getppid()} on here"):
        RunLock(tmp_path).acquire()
    holder_of(tmp_path, started_ticks=started_ticks(os.getppid()) + 1)
    lock = RunLock(tmp_path)
    lock.acquire()
    assert json.loads((tmp_path / LOCK).read_text())["token"] == lock.token
    lock.release()


@pytest.mark.parametrize("content", [None, "", "{", "[1]", '{"token": 3}', "\udcff"])
def test_of_another_machine_only_a_beat_says_that_it_lives(tmp_path, monkeypatch, content):
    """A lock of another host, or one whose text was cut short, is taken over when nothing touches it."""
    path = holder_of(tmp_path, machine="another boot", host="far")
    if content is not None:
        path.write_bytes(content.encode(errors="surrogateescape"))
    now = [0.0]

    def sleep(seconds: float, *, beats: bool) -> None:
        now[0] += seconds
        if beats:
            os.utime(path, ns=(0, 1))

    for beats in (True, False):
        clock = SimpleNamespace(monotonic=lambda: now[0], sleep=functools.partial(sleep, beats=beats))
        monkeypatch.setattr(run_lock, "time", clock)
        if beats:
            with pytest.raises(ConfigError, match="far" if content is None else "does not name"):
                RunLock(tmp_path).acquire()
    take_and_leave(tmp_path)
    assert now[0] > run_lock.STALE_S


def test_a_reader_tells_who_lives_waits_for_nothing_and_leaves_the_lock_as_it_is(tmp_path):
    now_s, wall_s = [0.0], 1000.0
    reader = LockReader(tmp_path, clock=lambda: now_s[0], wall=lambda: wall_s)
    assert reader.look() is None
    for lives, changes in ((True, {}), (False, {"started_ticks": 1}), (False, {"pid": 2**22 + 1, "started_ticks": 1})):
        os.utime(path := holder_of(tmp_path, **changes), (0, 900.0))
        assert LockReader(tmp_path).look() == (lives, 900.0)
    # Another machine's clock may be wrong: by it the last touch says something at the first look alone.
    os.utime(path := holder_of(tmp_path, machine="another boot"), (0, 999.0 - run_lock.STALE_S))
    assert reader.look() == (False, 999.0 - run_lock.STALE_S)
    looks = ((5, 7.0, True), (run_lock.STALE_S - 1, 7.0, True), (1, 7.0, False), (1, 8.0, True))
    for seconds, touched_s, lives in looks:
        now_s[0] += seconds
        os.utime(path, (0, touched_s))
        assert reader.look() == (lives, touched_s)
    assert json.loads(path.read_text())["machine"] == "another boot"


def test_a_holder_that_was_replaced_learns_so_at_its_next_beat_and_touches_nothing(tmp_path):
    said: list[str] = []
    lock = RunLock(tmp_path, lost=said.append)
    lock.acquire()
    path = holder_of(tmp_path, host="far")
    before = path.stat().st_mtime_ns
    lock.beat()
    assert len(said) == 1 and "far" in said[0] and "has taken over" in said[0]
    lock.beat()
    lock.release()
    assert len(said) == 1 and path.stat().st_mtime_ns == before


def test_a_beat_touches_the_lock_and_makes_it_again_where_it_was_removed(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    path = tmp_path / LOCK
    os.utime(path, ns=(0, 0))
    lock.beat()
    assert path.stat().st_mtime_ns > 0
    path.unlink()
    lock.beat()
    assert json.loads(path.read_text())["token"] == lock.token
    lock.release()


def test_of_many_that_replace_a_stale_lock_one_holds_it(tmp_path, monkeypatch):
    """Each settles until all others have replaced the lock too, or were refused."""
    arrived: list[float] = []

    def settle(seconds: float) -> None:
        arrived.append(seconds)
        assert until(lambda: len(arrived) + sum(each.done() for each in taken) >= 8)

    monkeypatch.setattr(run_lock, "time", SimpleNamespace(sleep=settle))
    holder_of(tmp_path, pid=2**22 + 1, started_ticks=1)
    locks = [RunLock(tmp_path, lost=lambda _: None) for _ in range(8)]
    taken: list[Future] = []
    with ThreadPoolExecutor(8) as pool:
        taken.extend(pool.submit(lock.acquire) for lock in locks)
    held = [lock for lock, each in zip(locks, taken, strict=True) if each.exception() is None]
    assert sum(isinstance(each.exception(), ConfigError) for each in taken) == 7
    assert len(held) == 1
    held[0].release()

"""The memory that weights travel through: nothing of it outlives its use, and a killed owner's is removed."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch

from megatron_rl.rollout.weight_sync import transport
from megatron_rl.rollout.weight_sync.transport import SEGMENT_PREFIX, Segment, Tally
from tests.patience import HANG_S, patient

pytestmark = pytest.mark.process

ROOT = pathlib.Path(__file__).parents[3]
OWNER = """
import sys
from megatron_rl.rollout.weight_sync import transport
import pathlib
transport.segment_folders = lambda: (pathlib.Path(sys.argv[1]),)
segment = transport.Segment(4096)
print(segment.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    monkeypatch.setattr(transport, "segment_folders", lambda: (tmp_path,))
    return tmp_path


def test_a_segment_is_this_users_alone_and_gone_when_closed(folder):
    segment = Segment(1000)
    assert segment.path.stat().st_mode & 0o777 == 0o600 and segment.path.stat().st_size == 1000
    segment.bytes[:] = 7
    assert segment.path.read_bytes() == b"\7" * 1000
    segment.close()
    segment.close()
    assert list(folder.iterdir()) == []


def test_what_a_killed_owner_left_is_removed_and_a_living_ones_is_not(folder):
    def owner() -> tuple[subprocess.Popen, pathlib.Path]:
        command = [sys.executable, "-c", OWNER, str(folder)]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return process, pathlib.Path(process.stdout.readline().strip())

    living, kept = owner()
    killed, left = owner()
    try:
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait(patient(HANG_S))
        assert kept.exists() and left.exists() and left.name.startswith(SEGMENT_PREFIX)
        own = Segment(64)
        assert kept.exists() and own.path.exists() and not left.exists()
        own.close()
    finally:
        for process in (living, killed):
            process.kill()
            process.communicate(timeout=patient(HANG_S))


def test_no_room_says_what_to_do_and_leaves_nothing(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        OSError, match="4,096 bytes of shared memory in .*No space left.*weight_sync.bucket_mb.*--shm-size"
    ):
        Segment(4096)
    assert list(folder.iterdir()) == []


def test_a_tally_is_of_the_order_and_of_the_counts():
    def value(*parts: tuple[str, int]) -> str:
        tally = Tally()
        for checksum, count in parts:
            tally.add(checksum, count)
        return tally.value()

    seen = [
        value(("a", 1), ("b", 2)),
        value(("b", 2), ("a", 1)),
        value(("a", 2), ("b", 1)),
        value(("a1", 1), ("b", 2)),
        value(),
    ]
    assert len(set(seen)) == len(seen) and value(("a", 1), ("b", 2)) == seen[0]


def test_broadcast_brings_the_bytes_to_every_rank():
    """A broadcast brings the bytes to every rank.

    Rank 0 is in this thread and rank 1 in another: two ends of one group, as trainer and worker have them. Loopback
    alone is listened on.
    """
    import threading
    from datetime import timedelta

    listener = transport.listen("127.0.0.1")
    address, port = listener.getsockname()
    sent, got = torch.arange(100_000, dtype=torch.int32).view(torch.uint8), []

    def join() -> None:
        group = transport.join_group(address, port, 1, 2, "gloo", timedelta(seconds=patient(HANG_S)))
        got.append(transport.receive(group, sent.numel(), torch.device("cpu")))
        group.shutdown()

    worker = threading.Thread(target=join)
    worker.start()
    group = transport.open_group(listener, 2, "gloo", timedelta(seconds=patient(HANG_S)))
    transport.broadcast(group, sent)
    worker.join(patient(HANG_S))
    group.shutdown()
    assert torch.equal(got[0], sent)

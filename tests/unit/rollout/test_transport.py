"""The memory that weights travel through: nothing of it outlives its use, and a killed owner's is removed."""

import os
import pathlib
import signal
import threading
from datetime import timedelta

import pytest
import torch

from megatron_rl.rollout.weight_sync import transport
from megatron_rl.rollout.weight_sync.transport import SEGMENT_PREFIX, Segment, Tally
from tests.patience import HANG_S, patient
from tests.workers.nursery import Fork, Nursery


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    path = tmp_path / "segments"
    path.mkdir()
    monkeypatch.setattr(transport, "segment_folders", lambda: (path,))
    return path


def test_a_segment_is_this_users_alone_and_gone_when_closed_and_no_room_says_what_to_do(folder, monkeypatch):
    segment = Segment(1000)
    assert segment.path.stat().st_mode & 0o777 == 0o600 and segment.path.stat().st_size == 1000
    segment.bytes[:] = 7
    assert segment.path.read_bytes() == b"\7" * 1000
    segment.close()
    segment.close()
    assert list(folder.iterdir()) == []

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="4,096 bytes.*No space left.*weight_sync.bucket_mb.*--shm-size"):
        Segment(4096)
    assert list(folder.iterdir()) == []


def test_what_a_killed_owner_left_is_removed_and_a_living_ones_is_not(folder, nursery: Nursery):
    def owner() -> tuple[Fork, pathlib.Path]:
        read, told = os.pipe()
        function = "tests.unit.rollout.receiving_engine:own_segment"
        process = nursery.start(function, [str(folder)], printed=folder.parent / "printed", pipe=told)
        os.close(told)
        with open(read) as lines:
            return process, pathlib.Path(lines.readline().strip())

    (living, kept), (killed, left) = owner(), owner()
    try:
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait(patient(HANG_S))
        assert kept.exists() and left.exists() and left.name.startswith(SEGMENT_PREFIX)
        own = Segment(64)
        assert kept.exists() and own.path.exists() and not left.exists()
        own.close()
    finally:
        living.kill()
        killed.kill()


def test_a_tally_is_of_the_order_and_of_the_counts():
    def value(*parts: tuple[str, int]) -> str:
        tally = Tally()
        for checksum, count in parts:
            tally.add(checksum, count)
        return tally.value()

    first = (("a", 1), ("b", 2))
    seen = [value(*parts) for parts in (first, first[::-1], (("a", 2), ("b", 1)), (("a1", 1), ("b", 2)), ())]
    assert len(set(seen)) == len(seen) and value(*first) == seen[0]


def test_broadcast_brings_the_bytes_to_every_rank():
    """Rank 0 is in this thread and rank 1 in another: two ends of one group, as trainer and worker have them."""
    bound = timedelta(seconds=patient(HANG_S))
    listener = transport.listen("127.0.0.1")
    address, port = listener.getsockname()
    sent, got = torch.arange(100_000, dtype=torch.int32).view(torch.uint8), []

    def join() -> None:
        group = transport.join_group(address, port, 1, 2, "gloo", bound)
        got.append(transport.receive(group, sent.numel(), torch.device("cpu")))
        group.shutdown()

    worker = threading.Thread(target=join)
    worker.start()
    group = transport.open_group(listener, 2, "gloo", bound)
    transport.broadcast(group, sent)
    worker.join(patient(HANG_S))
    group.shutdown()
    assert torch.equal(got[0], sent)

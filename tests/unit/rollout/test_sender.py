"""Checks rollout/weight_sync/sender.py over shared memory: every tensor arrives bit by bit, or no version."""

from collections.abc import Iterator

import pytest
import torch

from megatron_rl.errors import EngineError
from megatron_rl.rollout.engines.engine import NO_WEIGHTS
from megatron_rl.rollout.weight_sync import double_buffer, mapped
from megatron_rl.rollout.weight_sync.mapped import MappedSegments
from megatron_rl.rollout.weight_sync.sender import WeightSender
from megatron_rl.rollout.weight_sync.transport import Segment
from tests.unit.rollout.receiving_engine import Engine, broken_after, exported, num_bytes_of, sender_of, weights_of

VERSION, SENDER = 7, {"bucket_bytes": 256}
# several to a bucket, one larger than a bucket, two empty
TENSORS = weights_of([(3,), (5, 7), (1,), (65, 9), (2, 2), (0, 4), (4, 4), (13,), (6,), (1,), (63,), (0,)])


def assert_whole(engine: Engine) -> None:
    assert list(engine.held) == list(TENSORS)
    assert all(x.dtype == TENSORS[name].dtype and torch.equal(x, TENSORS[name]) for name, x in engine.held.items())


def test_every_tensor_reaches_every_engine_bit_by_bit(sync: WeightSender) -> None:
    engines = [Engine("one"), Engine("two")]
    for version in (VERSION, VERSION + 1):  # once more over the memory that was kept
        report = sync.deliver(exported(TENSORS), version, engines)
        assert report.failed == {} and (report.version, report.num_tensors) == (version, len(TENSORS))
        assert report.num_bytes == num_bytes_of(TENSORS)
        for engine in engines:
            assert_whole(engine)
            assert engine.weight_version == engine.end["version"] == version
            assert (engine.end["num_tensors"], engine.end["checksum"]) == (len(TENSORS), engine.tally.value())
    assert engines[0].asked.count("init_weight_transfer") == 1 and engines[0].asked.count("update_weights") > 6


@pytest.mark.parametrize("field, lie", [("version", VERSION - 1), ("checksum", "0" * 32), ("num_tensors", 3)])
def test_an_engine_whose_receipt_differs_has_no_version(sync: WeightSender, field: str, lie: object) -> None:
    """The receipt differs in its version, its checksum or its count, each alone; the other engine has the weights."""
    liar, honest = Engine("liar", **{field: lie}), Engine("honest")
    report = sync.deliver(exported(TENSORS), VERSION, [liar, honest])
    assert set(report.failed) == {"liar"} and "worker 0 of liar says that it holds" in report.failed["liar"]
    assert liar.weight_version == NO_WEIGHTS and honest.weight_version == VERSION


def test_an_engine_whose_drafter_was_spoiled_is_lost(sync: WeightSender) -> None:
    """The weights of the policy arrived whole; the checksum of the drafter's is not that of its start."""
    drafter = {"model": "the folder", "loaded": "0a", "held": "0a"}
    spoiled, whole = (Engine(held, drafter=drafter | {"held": held}) for held in ("0b", "0a"))
    report = sync.deliver(exported(TENSORS), VERSION, [spoiled, whole])
    assert set(report.failed) == set(report.lost) == {"0b"}
    assert "worker 0 of 0b has other weights of the drafter the folder than it loaded" in report.failed["0b"]
    assert spoiled.weight_version == NO_WEIGHTS and whole.weight_version == VERSION


class Cudart:
    """Stands for CUDA's runtime: keeps what is registered, in calls' order, and refuses where told to."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.held, self.calls = code, {}, []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert address not in self.held and num_bytes > 0 and flags == 1
        self.calls.append("register")
        if not self.code:
            self.held[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.held[address]
        self.calls.append("unregister")
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    """Make a sender for "cuda" pack in memory of the host, and register by the stand-in."""
    runtime = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(double_buffer, "memory_on", lambda device, num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    monkeypatch.setattr(mapped, "_forget_last_error", lambda: None)
    monkeypatch.setattr(mapped, "_warned", set())
    return runtime


@pytest.fixture
def gpu_sync(cudart: Cudart) -> Iterator[WeightSender]:
    sender = sender_of(256, device=torch.device("cuda", 0))
    yield sender
    sender.free()
    assert not cudart.held


def test_on_a_gpu_segments_are_registered_once_and_packed_on_the_device(gpu_sync: WeightSender, cudart: Cudart) -> None:
    """Two syncs register each segment once, and the device's memory is given back after each."""
    engine = Engine("one")
    for version in (VERSION, VERSION + 1):
        assert gpu_sync.deliver(exported(TENSORS), version, [engine]).failed == {}
        assert_whole(engine)
        assert len(cudart.held) == 2 and all(not len(x.bytes) and len(x.segment.bytes) for x in gpu_sync.buffers)
        assert {x.segment.bytes.data_ptr() for x in gpu_sync.buffers} == set(cudart.held)
    assert sorted(cudart.held.values()) == [63 * 4 + 4, 65 * 9 * 2 + 14]  # both enlarged, one of them anew
    gpu_sync.free()
    assert not cudart.held and cudart.calls.count("register") == cudart.calls.count("unregister") == 3


def test_segments_are_unregistered_after_errors(gpu_sync: WeightSender, cudart: Cudart) -> None:
    """Nothing stays registered after an exporter that raises, an engine that fails, or a want of memory."""
    with pytest.raises(EngineError, match="the exporter broke"):
        gpu_sync.deliver(broken_after(TENSORS, 5), VERSION, [Engine("one")])
    assert not cudart.held and cudart.calls.count("register") >= 1
    assert gpu_sync.deliver(exported(TENSORS), VERSION, [Engine("liar", num_tensors=3)]).failed
    assert not cudart.held
    assert not gpu_sync.deliver(exported(TENSORS), VERSION, [Engine("one")]).failed
    assert len(cudart.held) == 2


def test_without_registration_copies_are_pageable_and_one_warning_says_so(
    gpu_sync: WeightSender, cudart: Cudart, caplog: pytest.LogCaptureFixture
) -> None:
    cudart.code = 2
    engine = Engine("one")
    for version in (VERSION, VERSION + 1):
        assert gpu_sync.deliver(exported(TENSORS), version, [engine]).failed == {}
    assert_whole(engine)
    gpu_sync.free()
    (said,) = caplog.messages
    assert "cudaHostRegister: error 2" in said and "copied slower" in said
    assert "unregister" not in cudart.calls


def test_an_engine_registers_each_segment_that_it_maps_once(cudart: Cudart) -> None:
    segments = [Segment(64), Segment(96)]
    try:
        maps = MappedSegments(torch.device("cuda", 0))
        for number in (0, 1, 0, 1):
            segments[number].bytes.fill_(number + 7)
            assert maps.bytes_of(str(segments[number].path)).tolist() == [number + 7] * (64 + 32 * number)
        assert list(cudart.held.values()) == [64, 96]
        with pytest.raises(ValueError, match="is not a weight segment"):
            maps.bytes_of("/dev/shm/another")
        maps.release()
        maps.release()
        assert not cudart.held and cudart.calls == ["register"] * 2 + ["unregister"] * 2
        MappedSegments(torch.device("cpu")).bytes_of(str(segments[0].path))
        assert not cudart.held
    finally:
        for segment in segments:
            segment.close()

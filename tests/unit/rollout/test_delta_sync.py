"""Checks that the sender and its encoder of changes give engines what changed, and all of it where they need all."""

import errno
import os

import pytest
import torch

from megatron_rl.errors import EngineError
from megatron_rl.rollout.engines.engine import NO_WEIGHTS, SyncReport
from megatron_rl.rollout.weight_sync.changed_encoder import ChangedEncoder
from megatron_rl.rollout.weight_sync.double_buffer import BucketBuffer
from megatron_rl.rollout.weight_sync.host_copies import HostCopies
from megatron_rl.rollout.weight_sync.sender import WeightSender
from tests.unit.rollout.receiving_engine import Engine, broken_after, exported, num_bytes_of, weights_of

FULL_EVERY = 4
SENDER = {"bucket_bytes": 8192, "encoder": lambda: ChangedEncoder(FULL_EVERY)}
SIZES = [(3,), (50, 70), (1,), (650, 9), (20, 2), (0, 4), (400, 4), (130,), (6,), (1,), (630,), (0,)]


class Trainer:
    def __init__(self, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)) -> None:
        self.random, self.weights, self.version = torch.Generator().manual_seed(1), weights_of(SIZES, dtypes), 0

    def step(self, share: float = 0.01) -> None:
        for tensor in self.weights.values():
            moved = torch.rand(tensor.shape, generator=self.random) < share
            tensor[moved] = -tensor[moved]

    def send(self, sender: WeightSender, *engines: Engine) -> SyncReport:
        self.version += 1
        report = sender.deliver(exported(self.weights), self.version, engines)
        for engine in engines:
            if engine.name not in report.failed:
                assert engine.weight_version == self.version and list(engine.held) == list(self.weights)
                for name, tensor in engine.held.items():
                    wanted = self.weights[name]
                    assert tensor.dtype == wanted.dtype and tensor.shape == wanted.shape
                    assert tensor.view(-1).view(torch.uint8).equal(wanted.view(-1).view(torch.uint8)), name
        return report


def begun(sync: WeightSender, *engines: Engine, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)) -> Trainer:
    """Return a trainer that has sent everything once, and has made a step since."""
    trainer = Trainer(dtypes)
    trainer.send(sync, *engines)
    trainer.step()
    return trainer


def whole(report: SyncReport, trainer: Trainer) -> bool:
    """Tell whether an engine got all bytes, and not less than a tenth of them."""
    assert not report.failed, report.failed
    assert report.num_bytes == num_bytes_of(trainer.weights)
    assert report.sent_bytes >= report.num_bytes or report.sent_bytes < report.num_bytes / 10
    return report.sent_bytes >= report.num_bytes


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,), (torch.float32,), (torch.float32, torch.bfloat16)], ids=str)
def test_engines_hold_the_trainers_bits_after_every_sync(sync, dtypes):
    trainer, engines = Trainer(dtypes), [Engine("one"), Engine("two")]
    found = []
    for _ in range(2 * FULL_EVERY + 1):
        found.append(whole(trainer.send(sync, *engines), trainer))
        trainer.step()
    assert found == [number % FULL_EVERY == 0 for number in range(2 * FULL_EVERY + 1)]


def test_the_share_is_that_of_the_elements_that_changed(sync):
    trainer, engine = Trainer(), Engine("one")
    assert trainer.send(sync, engine).changed_share is None
    before = torch.cat([tensor.flatten() for tensor in trainer.weights.values()])
    trainer.step()
    now = torch.cat([tensor.flatten() for tensor in trainer.weights.values()])
    changed, elements = int((before != now).sum()), len(now)
    assert trainer.send(sync, engine).changed_share == changed / elements
    report = trainer.send(sync, engine)
    assert (report.changed_share, report.sent_bytes) == (0.0, 0)


def test_where_everything_changed_buckets_travel_whole(sync):
    trainer, engine = Trainer((torch.float32,)), Engine("one")
    trainer.send(sync, engine)
    trainer.step(1.0)
    report = trainer.send(sync, engine)
    assert report.changed_share == 1.0 and report.sent_bytes > 0.99 * report.num_bytes
    assert engine.changed_buckets <= 2  # buckets of a few small tensors, without the bytes between them
    trainer.step()
    assert not whole(trainer.send(sync, engine), trainer)


def test_a_new_and_a_restarted_engine_get_everything_and_the_other_what_changed(sync):
    trainer, new = begun(sync, old := Engine("old")), Engine("new")
    assert whole(trainer.send(sync, old, new), trainer)
    assert old.changed_buckets > 0 and new.changed_buckets == 0
    trainer.step()
    sync.forget(old)
    old.start_anew()
    trainer.send(sync, old, new)
    assert old.changed_buckets == 0 and new.changed_buckets > 0


def test_an_engine_whose_receipt_differs_gets_everything_at_once(sync, caplog):
    trainer, engine = Trainer(), Engine("one")
    trainer.send(sync, engine)
    engine.start_anew()  # behind the sender's back
    trainer.step()
    assert whole(trainer.send(sync, engine), trainer)
    assert "one holds weights" in caplog.text and "all weights are sent" in caplog.text
    trainer.step()
    assert not whole(trainer.send(sync, engine), trainer)


def test_an_engine_that_missed_a_sync_gets_everything(sync):
    trainer = begun(sync, absent := Engine("absent"), present := Engine("present"))
    trainer.send(sync, present)
    trainer.step()
    trainer.send(sync, absent, present)
    assert absent.changed_buckets == 0 and present.changed_buckets > 0


def test_a_damaged_change_fails_and_the_next_sync_brings_everything(sync, monkeypatch):
    trainer = begun(sync, engine := Engine("one"), other := Engine("two"))
    patch = engine.buckets.patch

    def flipped(fields, payload):
        payload = payload.clone()
        payload[-1:] ^= 1
        return patch(fields, payload)

    with monkeypatch.context() as planted:
        planted.setattr(engine.buckets, "patch", flipped)
        report = trainer.send(sync, engine, other)
    assert report.failed == {"one": "a bucket did not arrive as it was sent"} and other.changed_buckets > 0
    assert engine.weight_version == NO_WEIGHTS
    trainer.version -= 1  # the same version again, for the one that failed
    assert whole(trainer.send(sync, engine), trainer)
    trainer.step()
    assert not whole(trainer.send(sync, engine, other), trainer)
    assert engine.changed_buckets > 0 and other.changed_buckets > 0


def test_weights_that_broke_off_or_had_no_room_are_not_taken_for_sent(sync, monkeypatch):
    trainer = begun(sync, engine := Engine("one"))
    with pytest.raises(EngineError, match="the exporter broke"):
        sync.deliver(broken_after(trainer.weights, 7), 99, [engine])
    assert whole(trainer.send(sync, engine), trainer)
    trainer.step()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as planted:
        planted.setattr(BucketBuffer, "share", full)
        report = trainer.send(sync, engine)
    assert "No space left" in report.failed["one"] and engine.weight_version == NO_WEIGHTS
    assert whole(trainer.send(sync, engine), trainer)


def test_copies_forget_what_a_shorter_sync_lacks():
    copies, packed = HostCopies(), torch.arange(64, dtype=torch.uint8)
    tensors = [["weight", "bfloat16", [32], 0]]
    for count in (3, 1):
        copies.begin()
        for _ in range(count):
            copies.keep(tensors, packed)
        copies.end()
        assert len(copies) == count
    copies.begin()
    assert copies.compare(tensors, packed).num_changed == 0
    assert copies.compare(tensors, packed) is None  # there is no copy of a second bucket
    copies.begin()
    assert copies.compare([["another", "bfloat16", [32], 0]], packed) is None
    copies.clear()
    with pytest.raises(ValueError, match="the changes of bucket 0 arrived, and 0 buckets are held here"):
        copies.patch({"word_bytes": 2, "code_bytes": 1, "num_codes": 0, "num_changed": 0}, packed[:0])

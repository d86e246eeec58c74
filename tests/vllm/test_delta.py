"""An engine that gets only what changed holds the trainer's bits after every sync, and everything after a restart."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from megatron_rl.rollout.engine import NO_WEIGHTS, SyncReport
from megatron_rl.rollout.vllm.replica import WeightReceipt
from megatron_rl.rollout.weight_sync.half import Half
from megatron_rl.rollout.weight_sync.sender import WeightSender
from tests.vllm.rig import CPU, DEADLINE_S, LOGPROB_TOLERANCE, Bench, make_prompts, model_folder, start_bench

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]

PROMPTS = make_prompts(5, 40, 70)
FULL_EVERY = 6


class Trainer:
    """Holds weights that move by steps of Adam's size, and sends them to a bench's engine."""

    def __init__(self, bench: Bench, seed: int, share: float = 0.004) -> None:
        self.bench, self.share = bench, share
        self.random = torch.Generator().manual_seed(seed)
        self.weights = bench.weights(seed)

    def step(self) -> SyncReport:
        """Move a share of the elements, those of one tensor in four not at all, and send the weights."""
        for index, tensor in enumerate(self.weights.values()):
            if index % 4:
                moved = torch.rand(tensor.shape, generator=self.random) < self.share
                tensor[moved] += 0.05 * torch.randn(int(moved.sum()), generator=self.random)
        return self.send()

    def send(self) -> SyncReport:
        self.bench.model.load_state_dict(self.weights, strict=False)
        return self.bench.sync(self.weights.items())

    def checks(self, report: SyncReport, *, whole: bool) -> None:
        """Assert that the engine holds the weights, by its log-probs and its receipt, and got them as it should."""
        assert not report.failed, report.failed
        assert report.num_bytes == sum(x.nbytes for x in self.weights.values())
        if whole:
            assert report.changed_share is None and report.sent_bytes >= report.num_bytes
        else:
            assert 0 < report.changed_share < 2 * self.share and report.sent_bytes < 0.1 * report.num_bytes
        assert self.bench.largest_gap(PROMPTS[:1], 2) < LOGPROB_TOLERANCE


def start(inputs, root, *overrides: str, tied: bool = True, ranks: int = 1) -> Bench:
    folder = model_folder(inputs / "model", root / "model", "qwen3", tied=tied)
    settings = ("weight_sync.delta=true", f"weight_sync.full_every={FULL_EVERY}", "weight_sync.bucket_mb=0.12")
    started = start_bench(folder, root / "run", *settings, *overrides, ranks=ranks)
    started.engine.recover(())
    return started


@pytest.fixture(scope="module")
def bench(inputs, tmp_path_factory) -> Iterator[Bench]:
    """Start an engine that gets what changed, over several buckets."""
    started = start(inputs, tmp_path_factory.mktemp("delta"))
    try:
        yield started
    finally:
        started.engine.close()


def begin(bench: Bench, seed: int) -> Trainer:
    """Return a trainer whose first weights the engine holds, right after a sync that brought all."""
    trainer = Trainer(bench, seed)
    bench.engine._sync._syncs = 0
    trainer.checks(trainer.send(), whole=True)
    return trainer


def test_only_what_changed_is_sent_but_for_every_sixth_sync(bench):
    trainer = begin(bench, 1)
    for number in range(1, 2 * FULL_EVERY + 2):
        trainer.checks(trainer.step(), whole=number % FULL_EVERY == 0)


def test_a_sync_that_changed_nothing_sends_no_bytes(bench):
    trainer = begin(bench, 2)
    report = trainer.send()
    assert (report.failed, report.sent_bytes, report.changed_share) == ({}, 0, 0.0)
    assert bench.largest_gap(PROMPTS) < LOGPROB_TOLERANCE


def test_a_restarted_engine_gets_everything(bench):
    trainer = begin(bench, 3)
    trainer.checks(trainer.step(), whole=False)
    pid = bench.pid
    os.kill(pid, signal.SIGKILL)
    bench.engine.recover([bench.replica.name])
    assert bench.pid != pid
    trainer.checks(trainer.step(), whole=True)
    trainer.checks(trainer.step(), whole=False)


def test_a_receipt_that_differs_leads_to_a_whole_sync_at_once(bench):
    trainer = begin(bench, 4)
    receipt = bench.engine._sync.receipts[id(bench.replica)]
    damaged = WeightReceipt(version=receipt.version, checksum="0" * 32, num_tensors=receipt.num_tensors)
    bench.engine._sync.receipts[id(bench.replica)] = damaged
    trainer.checks(trainer.step(), whole=True)
    trainer.checks(trainer.step(), whole=False)


def test_weights_of_another_sender_in_between_lead_to_a_whole_sync(bench):
    trainer = begin(bench, 5)
    other = {name: tensor + 1 for name, tensor in trainer.weights.items()}
    sender = WeightSender(channel="shared_memory", bucket_bytes=1 << 20, deadline_s=DEADLINE_S, device=CPU)
    assert not sender.deliver(iter(other.items()), next(bench.versions), [bench.replica]).failed
    sender.free()
    trainer.checks(trainer.step(), whole=True)
    trainer.checks(trainer.step(), whole=False)


def test_a_damaged_change_fails_and_is_mended_by_a_whole_sync(bench, monkeypatch):
    trainer = begin(bench, 6)
    change_message, damaged = Half.change_message, []

    def flipped(half, message, difference, payload):
        if not damaged and len(payload):
            damaged.append(payload.clone())
            payload[-1] ^= 1
        return change_message(half, message, difference, payload)

    with monkeypatch.context() as planted:
        planted.setattr(Half, "change_message", flipped)
        report = trainer.step()
    assert damaged and "did not arrive as it was sent" in report.failed[bench.replica.name]
    assert bench.engine.weight_version == NO_WEIGHTS
    trainer.checks(trainer.send(), whole=True)
    trainer.checks(trainer.step(), whole=False)


def test_two_workers_hold_the_trainers_weights(inputs, tmp_path):
    pair = start(inputs, tmp_path, "rollout.tensor_parallel=2", tied=False, ranks=2)
    try:
        trainer = begin(pair, 7)
        for _ in range(3):
            trainer.checks(trainer.step(), whole=False)
    finally:
        pair.engine.close()


@pytest.mark.long(seconds=240)
def test_two_hundred_steps_with_four_kills(bench, monkeypatch):
    """200 steps, each checked by the engine's log-probs; the engine is killed before four of them."""
    trainer = begin(bench, 8)
    monkeypatch.setattr(bench.engine._sync, "_full_every", 50)
    kills, sent = {30, 75, 76, 160}, []
    for number in range(1, 201):
        if number in kills:
            os.kill(bench.pid, signal.SIGKILL)
            bench.engine.recover([bench.replica.name])
        report = trainer.step()
        trainer.checks(report, whole=number in kills or number % 50 == 0)
        sent.append(report.sent_bytes)
    assert sum(size >= report.num_bytes for size in sent) == len(kills) + 4

"""An engine that gets only what changed holds the trainer's bits after every sync, and everything after a restart."""

import os
import signal
from collections.abc import Iterator

import pytest

from megatron_rl.rollout.engines.engine import NO_WEIGHTS
from megatron_rl.rollout.weight_sync.double_buffer import BucketBuffer
from tests.vllm.rig import LOGPROB_TOLERANCE, Bench, running
from tests.vllm.trainer import DELTA, FULL_EVERY, PROMPTS, Trainer, begin

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]


@pytest.fixture(scope="module")
def bench(inputs, tmp_path_factory) -> Iterator[Bench]:
    """Start an engine that gets what changed, over several buckets."""
    with running(inputs, tmp_path_factory.mktemp("delta"), "qwen3", *DELTA) as started:
        yield started


def mended_by_a_whole_sync(trainer: Trainer) -> None:
    trainer.checks(trainer.step(), whole=True)
    trainer.checks(trainer.step(), whole=False)


def test_only_what_changed_is_sent_but_for_every_sixth_sync(bench):
    trainer = begin(bench, 1)
    for number in range(1, 2 * FULL_EVERY + 2):
        trainer.checks(trainer.step(), whole=number % FULL_EVERY == 0)
    report = trainer.send()  # of the same weights
    assert (report.failed, report.sent_bytes, report.changed_share) == ({}, 0, 0.0)
    assert bench.largest_gap(PROMPTS) < LOGPROB_TOLERANCE


@pytest.mark.long
def test_a_restarted_engine_gets_everything(bench):
    trainer = begin(bench, 3)
    trainer.checks(trainer.step(), whole=False)
    pid = bench.pid
    os.kill(pid, signal.SIGKILL)
    bench.engine.recover([bench.replica.name])
    assert bench.pid != pid
    mended_by_a_whole_sync(trainer)


def test_a_damaged_change_fails_and_is_mended_by_a_whole_sync(bench, monkeypatch):
    trainer = begin(bench, 6)
    share, damaged = BucketBuffer.share, []

    def flipped(buffer, payload):
        if not damaged and len(payload):
            damaged.append(payload.clone())
            payload[-1] ^= 1
        return share(buffer, payload)

    with monkeypatch.context() as planted:
        planted.setattr(BucketBuffer, "share", flipped)
        report = trainer.step()
    assert damaged and "did not arrive as it was sent" in report.failed[bench.replica.name]
    assert bench.engine.weight_version == NO_WEIGHTS
    trainer.checks(trainer.send(), whole=True)
    trainer.checks(trainer.step(), whole=False)

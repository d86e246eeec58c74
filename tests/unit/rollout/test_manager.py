"""Rollouts and weights over an engine that fails."""

import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence

import pytest
import torch

from megatron_rl.config import RolloutConfig
from megatron_rl.errors import EngineError
from megatron_rl.rollout.engines.engine import NO_WEIGHTS, EngineLost, SyncReport
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.trainer.passes.gap_check import guard_logprob_gap
from megatron_rl.types import Rollout
from tests.unit.rollout.fake_engine import WillingEngine, group_of, manager_of, prompts_of

SAMPLES, NAMED = 3, prompts_of(range(7))
IDS = [f"{k}@0#{sample}" for k in NAMED for sample in range(SAMPLES)]
pytestmark = pytest.mark.usefixtures("alone")


class LossyEngine(WillingEngine):
    """An engine that is lost in the calls that ``answers`` names, and finishes the calls after these.

    answers[k]: how many prompts its k-th call finishes before it is lost. syncs: the ends of its first syncs.
    """

    is_elsewhere = False

    def __init__(self, answers: Sequence[int] = (), syncs: Sequence[str] = (), refusal: Exception | None = None):
        super().__init__()
        self.answers, self.syncs, self.refusal = list(answers), list(syncs), refusal
        self.sent: list[int] = []
        self.recovered: list[tuple[str, ...]] = []

    def recover(self, lost) -> None:
        self.recovered.append(tuple(lost))
        self.lost = []

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        num_bytes = sum(tensor.nbytes for _, tensor in tensors)
        self.sent.append(version)
        word = self.syncs.pop(0) if self.syncs else "whole"
        failed = {} if word == "whole" else {"the engine": f"a checksum differs ({word})"}
        lost = ("the engine",) if word == "lost" else ()
        return SyncReport(version=version, num_tensors=1, num_bytes=num_bytes, seconds=0.5, failed=failed, lost=lost)

    def take_report(self, version, failed, lost) -> None:
        self.weight_version, self.lost = NO_WEIGHTS if failed else version, sorted(lost)

    def generate(self, prompts, samples_per_prompt, *, on_finished, **given) -> list[Rollout]:
        assert self.weight_version != NO_WEIGHTS
        if not self.answers and not self.refusal:
            return super().generate(prompts, samples_per_prompt, on_finished=on_finished)
        self.calls.append([prompt.name for prompt in prompts])
        if self.refusal:
            raise self.refusal
        # an engine finishes in any order: here the last prompts
        done = range(len(prompts) - self.answers.pop(0), len(prompts))
        finished = {k: self.group(prompts[k], samples_per_prompt[k]) for k in done}
        for k in done:
            on_finished(k, finished[k])
        self.lost, self.weight_version = ["the engine"], NO_WEIGHTS
        raise EngineLost("it was killed", finished=finished)


def generation_of(engine: LossyEngine, *overrides: str, version=lambda: 4, share=(0, 1)) -> RolloutManager:
    """Make a manager that sends 40 bytes of weights, and send them where an engine may fail at rollouts alone."""
    found = manager_of(engine, *overrides, version=version, share=share, weights={"weight": torch.zeros(10)})
    if not engine.syncs:
        found.sync_weights()
    return found


@pytest.mark.parametrize("answers", [(), (0,), (3,), (2, 3), (0, 0), (6, 0, 0)])
def test_a_disturbed_call_equals_an_undisturbed_one(answers):
    job = generation_of(engine := LossyEngine(answers)).produce(NAMED, SAMPLES)
    assert [x.sample_id for place in job.mine for x in job.rollouts[place]] == IDS
    assert list(job.mine) == list(NAMED) and {len(x) for x in job.scores.values()} == {SAMPLES}
    owed = [len(NAMED) - sum(answers[:k]) for k in range(len(answers) + 1)]
    assert [len(call) for call in engine.calls] == owed  # what is finished is not asked for again
    assert engine.sent == [4] * (1 + len(answers)) and engine.recovered == [(), *[("the engine",)] * len(answers)]
    assert {rollout.weight_version for group in job.rollouts.values() for rollout in group} == {4}


def test_a_rank_takes_its_share_alone():
    """And a rank without an engine none."""
    produced = generation_of(idle := LossyEngine(), share=None).produce(NAMED, SAMPLES).rollouts
    assert produced == {} and idle.calls == []
    for rank in range(3):
        generation = generation_of(LossyEngine((1,)), share=(rank, 3))
        job = generation.produce(NAMED, SAMPLES)
        assert job.rollouts.keys().isdisjoint(produced)
        produced |= job.rollouts
    assert [x.sample_id for place in sorted(produced) for x in produced[place]] == IDS


def test_the_truncated_share_is_that_of_all_samples_since_the_metrics_were_taken():
    """A group that was cut off and a refill without one give their share together; an evaluation counts in neither."""
    generation = generation_of(LossyEngine())
    whole = {place: group_of(prompt, SAMPLES) for place, prompt in NAMED.items()}
    for first in ("length", "stop"):
        job = generation.job(NAMED, dict.fromkeys(NAMED, SAMPLES))
        for place, rollouts in whole.items():
            job.put(place, [dataclasses.replace(rollouts[0], finish_reason=first), *rollouts[1:]], None)
        generation.finish(job)
    assert generation.take_metrics()["rollout/truncated_share"] == len(NAMED) / (2 * len(NAMED) * SAMPLES)
    generation.finish(job)
    assert generation.take_metrics()["rollout/truncated_share"] == 0.0


def test_the_repeat_share_counts_samples_seen_before_in_their_own_group():
    """Equal answers to two prompts are no repeats; nor are samples that differ in the context an agent made."""
    generation = generation_of(LossyEngine())
    job = generation.job(NAMED, dict.fromkeys(NAMED, SAMPLES))
    for place, prompt in NAMED.items():
        first, *others = group_of(prompt, SAMPLES)
        ids = [(5, 6), (5, 6), (5, 6)] if place == 0 else [(5, 6), (5,), (5, 6)] if place == 1 else [(5, 6), (7,), (8,)]
        context = (4,) if place == 1 else None
        group = [dataclasses.replace(sample, response_ids=x) for sample, x in zip((first, *others), ids, strict=True)]
        job.put(place, [dataclasses.replace(group[0], context_ids=context), *group[1:]], None)
    generation.finish(job)
    assert generation.take_metrics()["rollout/repeat_share"] == 2 / (len(NAMED) * SAMPLES)


def test_what_an_engine_refuses_is_raised_and_not_asked_again():
    generation = generation_of(engine := LossyEngine(refusal=ValueError("the prompt is too long")))
    with pytest.raises(ValueError, match="the prompt is too long"):
        generation.produce(NAMED, SAMPLES)
    assert len(engine.calls) == 1


@pytest.mark.parametrize("syncs", [("failed", "failed"), ("lost", "failed"), ("lost", "lost")])
def test_a_sync_that_fails_twice_and_comes_through(syncs, caplog):
    generation = generation_of(engine := LossyEngine(syncs=syncs), "weight_sync.attempts=3")
    with caplog.at_level(logging.WARNING):
        generation.sync_weights()
    assert engine.sent == [4, 4, 4] and engine.weight_version == 4
    said = zip((1, 2), caplog.messages, strict=True)
    assert all(f"weight version 4 failed (attempt {k} of 3)" in message for k, message in said)
    assert engine.recovered == [(), *[("the engine",) if word == "lost" else () for word in syncs]]
    assert generation.metrics.totals["syncs"] == 1 and generation.take_metrics()["perf/weight_sync_bytes"] == 40.0


def test_the_bytes_sent_and_the_share_changed_are_metrics_of_delta_syncs_alone():
    for settings, share, wanted in (
        ((), 0.25, {}),
        (("weight_sync.delta=true",), None, {"sent_bytes": 12.0}),
        (("weight_sync.delta=true",), 0.25, {"sent_bytes": 12.0, "changed_share": 0.25}),
    ):
        engine, sent = LossyEngine(), {"sent_bytes": 12, "changed_share": share}
        load = engine.load_weights
        engine.load_weights = lambda *given, load=load, sent=sent: dataclasses.replace(load(*given), **sent)
        generation = generation_of(engine, *settings)
        generation.sync_weights()
        found = {name: x for name, x in generation.take_metrics().items() if name.startswith("perf/weight_sync_")}
        added = {f"perf/weight_sync_{name}": value for name, value in wanted.items()}
        assert found == {"perf/weight_sync_bytes": 40.0, "perf/weight_sync_bytes_per_second": 80.0} | added


def test_a_sync_that_fails_too_often_ends_with_its_causes():
    engine = LossyEngine(syncs=("failed",) * 5)
    with pytest.raises(EngineError) as ended:
        generation_of(engine, "weight_sync.attempts=3").sync_weights()
    words = ["weight version 4", "in 3 attempts (weight_sync.attempts)", "the engine: a checksum differs"]
    assert all(word in str(ended.value) for word in words) and engine.sent == [4] * 3
    assert engine.weight_version == NO_WEIGHTS  # none that could be sampled from


def test_a_step_that_moved_nothing_sends_nothing_but_to_an_engine_that_was_lost():
    engine, held, exports = LossyEngine(), [4], []
    generation = generation_of(engine, version=lambda: held[0])
    generation.weights.tensors = lambda engine: exports.append(held[0]) or iter([])
    for version in (4, 4, 5, 5, 5):
        held[0] = version
        generation.sync_weights()
        generation.produce(NAMED, 1)
    assert engine.sent == [4, 5] and exports == [5] and len(engine.recovered) == 2
    engine.lost = ["the engine"]
    generation.sync_weights()
    assert engine.recovered[2:] == [("the engine",)] and engine.sent == [4, 5, 5]


# ---- the gap between trainer and engine -----------------------------------------------------------------------------


def guard(mean: float, highest: float, dtype: str = "bfloat16", **settings) -> None:
    sums = {"tokens": 100.0, "logprob_gap_abs": mean * 100.0, "logprob_gap_max": highest}
    guard_logprob_gap(sums, RolloutConfig(**({"warn_logprob_gap": 0.05, "max_logprob_gap": 0.5} | settings)), dtype)


@pytest.mark.parametrize(("dtype", "threshold", "below", "above"), [
    ("bfloat16", 0.05, 0.05, 0.06),  # a mean at the threshold is not above it
    ("bfloat16", 0.05, 0.05, 0.5),
    ("bfloat16", None, 0.049, 0.051),  # the dtype's
    ("float32", None, 0.0009, 0.0011),
])
def test_a_gap_above_the_first_threshold_warns_with_both_numbers(dtype, threshold, below, above, caplog):
    guard(below, 3.0, dtype, warn_logprob_gap=threshold)  # a single token may be far off
    assert not caplog.messages
    guard(above, 0.7, dtype, warn_logprob_gap=threshold)
    (message,) = caplog.messages
    assert f"{above} nats per token" in message and "0.7 at most" in message and "rollout.warn_logprob_gap" in message


@pytest.mark.parametrize(
    ("mean", "highest", "settings"),
    [(0.51, 7.25, {}), *((bad, bad, {"max_logprob_gap": most}) for bad in (math.nan, math.inf) for most in (0.5, 1e9))],
)
def test_a_gap_above_the_second_threshold_or_no_number_stops_with_both_numbers(mean, highest, settings):
    with pytest.raises(EngineError) as stopped:
        guard(mean, highest, **settings)
    words = (f"{mean} nats per token", f"{highest} at most", "rollout.max_logprob_gap=")
    assert all(word in str(stopped.value) for word in words)


def test_null_switches_the_second_threshold_off_and_a_pass_without_tokens_says_nothing(caplog):
    guard(1e6, 1e6, max_logprob_gap=None)
    assert len(caplog.messages) == 1 and "rollout.warn_logprob_gap" in caplog.messages[0]
    for sums in ({}, {"tokens": 0.0, "logprob_gap_abs": 0.0, "logprob_gap_max": 0.0}):
        guard_logprob_gap(sums, RolloutConfig(max_logprob_gap=0.0, warn_logprob_gap=0.0), "float32")
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("mode", ["sync", "prefetch"])
def test_whoever_goes_on_after_an_error_owes_nothing(mode):
    """A call that ended by too many failed syncs leaves no job behind that a later call would wait for."""
    engine = LossyEngine(answers=(2,), syncs=("whole", "failed", "failed"))
    generation = generation_of(engine, "weight_sync.attempts=2", f"rollout.producer.mode={mode}")
    with pytest.raises(EngineError, match="did not arrive in 2 attempts"):
        generation.produce(NAMED, SAMPLES)
    assert generation.jobs == []
    assert len(generation.produce(NAMED, SAMPLES).rollouts) == len(NAMED)
    generation.close()

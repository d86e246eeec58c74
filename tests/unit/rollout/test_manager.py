"""Rollouts and weights over an engine that fails.

Lost prompts are asked for again, and a failure that cannot be mended ends with its numbers.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from megatron_rl.config import RolloutConfig, load_config
from megatron_rl.errors import EngineError
from megatron_rl.rollout.engine import NO_WEIGHTS, EngineLost, SyncReport
from megatron_rl.rollout.logprob_gap import guard_logprob_gap
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.types import Prompt, Rollout, Score

PROMPTS = [Prompt(prompt_id=f"{index}@0", text="", token_ids=(5, 6), columns={}) for index in range(7)]
SAMPLES = 3
NAMED = dict(enumerate(PROMPTS))


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """Make a world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def rollout_of(prompt: Prompt, index: int, version: int) -> Rollout:
    return Rollout(
        prompt=prompt,
        sample_index=index,
        response_ids=(index, 7),
        logprobs=(-1.0, -2.0),
        text="",
        finish_reason="stop",
        weight_versions=((version, 2),),
    )


class FakeEngine:
    """An engine that is lost in the calls that ``answers`` names, and finishes the calls after these.

    answers[k]: how many prompts its k-th call finishes before it is lost. syncs: the ends of its first syncs.
    """

    def __init__(
        self, answers: tuple[int, ...] = (), syncs: tuple[str, ...] = (), refusal: Exception | None = None
    ) -> None:
        self.answers, self.syncs, self.refusal = list(answers), list(syncs), refusal
        self.weight_version, self.lost = NO_WEIGHTS, []
        self.is_elsewhere, self.progressed_at = False, -math.inf
        self.calls: list[list[str]] = []
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
        self.weight_version = NO_WEIGHTS if failed else version
        self.lost = sorted(lost)

    def generate(
        self, prompts, samples_per_prompt, *, temperature=None, max_tokens=None, on_finished=None
    ) -> list[Rollout]:
        assert self.weight_version != NO_WEIGHTS
        self.calls.append([prompt.prompt_id for prompt in prompts])
        if self.refusal:
            raise self.refusal
        groups = [
            [rollout_of(prompt, index, self.weight_version) for index in range(samples_per_prompt)]
            for prompt in prompts
        ]
        whole = not self.answers
        finished = len(prompts) if whole else self.answers.pop(0)
        done = range(len(prompts) - finished, len(prompts))  # an engine finishes in any order: here the last prompts
        for k in done:
            on_finished(k, groups[k])
        if whole:
            return [rollout for group in groups for rollout in group]
        self.lost, self.weight_version = ["the engine"], NO_WEIGHTS
        raise EngineLost("it was killed", finished={k: groups[k] for k in done})

    def sleep(self) -> None: ...

    def wake(self, *, tags) -> None: ...

    def close(self) -> None:
        self.calls.append(["closed"])


def generation_of(
    engine: FakeEngine, *overrides: str, version: Callable[[], int] = lambda: 4, share=(0, 1)
) -> RolloutManager:
    return RolloutManager(
        engine,
        lambda rollouts: [Score(total=float(x.sample_index), by_function=()) for x in rollouts],
        load_config(None, list(overrides)),
        export=lambda: iter([("weight", torch.zeros(10))]),
        version=version,
        share=share,
    )


@pytest.mark.parametrize("answers", [(), (0,), (3,), (2, 3), (0, 0), (6, 0, 0)])
def test_a_disturbed_call_equals_an_undisturbed_one(answers):
    engine = FakeEngine(answers)
    generation = generation_of(engine)
    generation.sync_weights()
    job = generation.produce(NAMED, SAMPLES)
    assert [x.sample_id for place in job.mine for x in job.rollouts[place]] == [
        f"{prompt.prompt_id}#{k}" for prompt in PROMPTS for k in range(SAMPLES)
    ]
    assert list(job.mine) == list(range(len(PROMPTS))) and {len(x) for x in job.scores.values()} == {SAMPLES}
    owed = [len(PROMPTS) - sum(answers[:k]) for k in range(len(answers) + 1)]
    assert [len(call) for call in engine.calls] == owed  # what is finished is not asked for again
    assert engine.sent == [4] * (1 + len(answers)) and engine.recovered == [(), *[("the engine",)] * len(answers)]
    assert {rollout.weight_version for group in job.rollouts.values() for rollout in group} == {4}


def test_a_rank_takes_its_share_alone():
    produced_by = {}
    for rank in range(3):
        generation = generation_of(FakeEngine((1,)), share=(rank, 3))
        generation.sync_weights()
        job = generation.produce(NAMED, SAMPLES)
        assert job.rollouts.keys().isdisjoint(produced_by)
        produced_by |= {place: [x.sample_id for x in job.rollouts[place]] for place in job.mine}
    assert produced_by == {i: [f"{prompt.prompt_id}#{k}" for k in range(SAMPLES)] for i, prompt in enumerate(PROMPTS)}


def test_a_rank_without_an_engine_produces_nothing():
    engine = FakeEngine()
    generation = generation_of(engine, share=None)
    generation.sync_weights()
    assert generation.produce(NAMED, SAMPLES).rollouts == {} and engine.calls == []


def test_the_truncated_share_is_that_of_all_samples_since_the_metrics_were_taken():
    """A group that was cut off and a refill without one give their share together; an evaluation counts in neither."""
    generation = generation_of(FakeEngine())
    whole = {place: [rollout_of(prompt, i, 4) for i in range(SAMPLES)] for place, prompt in NAMED.items()}
    for first in ("length", "stop"):
        job = generation.job(NAMED, SAMPLES)
        for place, rollouts in whole.items():
            job.put(place, [dataclasses.replace(rollouts[0], finish_reason=first), *rollouts[1:]], None)
        generation.finish(job)
    assert generation.take_metrics()["rollout/truncated_share"] == len(NAMED) / (2 * len(NAMED) * SAMPLES)
    generation.finish(job)
    assert generation.take_metrics()["rollout/truncated_share"] == 0.0


def test_what_an_engine_refuses_is_raised_and_not_asked_again():
    engine = FakeEngine(refusal=ValueError("the prompt is too long"))
    generation = generation_of(engine)
    generation.sync_weights()
    with pytest.raises(ValueError, match="the prompt is too long"):
        generation.produce(NAMED, SAMPLES)
    assert len(engine.calls) == 1


@pytest.mark.parametrize("syncs", [("failed", "failed"), ("lost", "failed"), ("lost", "lost")])
def test_a_sync_that_fails_twice_and_comes_through(syncs, caplog):
    engine = FakeEngine(syncs=syncs)
    generation = generation_of(engine, "weight_sync.attempts=3")
    with caplog.at_level(logging.WARNING):
        generation.sync_weights()
    assert engine.sent == [4, 4, 4] and engine.weight_version == 4
    assert [message[:47] for message in caplog.messages] == [
        f"sync of weight version 4 failed (attempt {k} of 3)"[:47] for k in (1, 2)
    ]
    assert engine.recovered == [(), *[("the engine",) if word == "lost" else () for word in syncs]]
    assert generation.metrics.totals["syncs"] == 1 and generation.take_metrics()["perf/weight_sync_bytes"] == 40.0


def test_the_bytes_sent_and_the_share_changed_are_metrics_of_delta_syncs_alone():
    for settings, share, wanted in (
        ((), 0.25, {}),
        (("weight_sync.delta=true",), None, {"sent_bytes": 12.0}),
        (("weight_sync.delta=true",), 0.25, {"sent_bytes": 12.0, "changed_share": 0.25}),
    ):
        engine = FakeEngine()
        load = engine.load_weights
        engine.load_weights = lambda *given, load=load, share=share: dataclasses.replace(
            load(*given), sent_bytes=12, changed_share=share
        )
        generation = generation_of(engine, *settings)
        generation.sync_weights()
        found = {name: x for name, x in generation.take_metrics().items() if name.startswith("perf/weight_sync_")}
        added = {f"perf/weight_sync_{name}": value for name, value in wanted.items()}
        assert found == {"perf/weight_sync_bytes": 40.0, "perf/weight_sync_bytes_per_second": 80.0} | added


def test_a_sync_that_fails_too_often_ends_with_its_causes():
    engine = FakeEngine(syncs=("failed",) * 5)
    with pytest.raises(EngineError) as ended:
        generation_of(engine, "weight_sync.attempts=3").sync_weights()
    words = ["weight version 4 did not arrive in 3 attempts (weight_sync.attempts)", "the engine: a checksum differs"]
    assert all(word in str(ended.value) for word in words) and engine.sent == [4] * 3
    with pytest.raises(AssertionError):  # the engine holds no version that could be sampled from
        engine.generate(PROMPTS, 1, on_finished=print)


def test_a_step_that_moved_nothing_sends_nothing():
    engine, held = FakeEngine(), [4]
    exports = []
    generation = generation_of(engine, version=lambda: held[0])
    generation._export = lambda: exports.append(held[0]) or iter([])
    for version in (4, 4, 5, 5, 5):
        held[0] = version
        generation.sync_weights()
        generation.produce(NAMED, 1)
    assert engine.sent == exports == [4, 5] and len(engine.recovered) == 2


def test_a_lost_engine_is_mended_even_where_nothing_moved():
    engine = FakeEngine()
    generation = generation_of(engine)
    generation.sync_weights()
    engine.lost = ["the engine"]
    generation.sync_weights()
    assert engine.recovered == [(), ("the engine",)] and engine.sent == [4, 4]


# ---- the gap between trainer and engine -----------------------------------------------------------------------------


def guard(mean: float, highest: float, dtype: str = "bfloat16", **settings) -> None:
    sums = {"tokens": 100.0, "logprob_gap_abs": mean * 100.0, "logprob_gap_max": highest}
    guard_logprob_gap(sums, RolloutConfig(**({"warn_logprob_gap": 0.05, "max_logprob_gap": 0.5} | settings)), dtype)


def test_a_small_gap_says_nothing(caplog):
    guard(0.05, 3.0)  # a mean at the threshold is not above it, and a single token may be far off
    assert not caplog.messages


def test_a_gap_above_the_first_threshold_warns_with_both_numbers(caplog):
    guard(0.06, 0.7)
    (message,) = caplog.messages
    assert "0.06 nats per token" in message and "0.7 at most" in message and "rollout.warn_logprob_gap=0.05" in message
    caplog.clear()
    guard(0.5, 0.7)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("dtype, below, above", [("float32", 0.0009, 0.0011), ("bfloat16", 0.049, 0.051)])
def test_the_first_threshold_is_by_default_the_dtypes(dtype, below, above, caplog):
    guard(below, 1.0, dtype, warn_logprob_gap=None)
    assert not caplog.messages
    guard(above, 1.0, dtype, warn_logprob_gap=None)
    assert len(caplog.messages) == 1


def test_a_gap_above_the_second_threshold_stops_with_both_numbers():
    with pytest.raises(EngineError) as stopped:
        guard(0.51, 7.25)
    assert all(
        word in str(stopped.value) for word in ("0.51 nats per token", "7.25 at most", "rollout.max_logprob_gap=0.5")
    )


@pytest.mark.parametrize("mean", [math.nan, math.inf])
@pytest.mark.parametrize("settings", [{}, {"max_logprob_gap": 1e9}])
def test_a_gap_that_is_no_number_stops(mean, settings):
    with pytest.raises(EngineError, match="rollout.max_logprob_gap="):
        guard(mean, mean, **settings)


def test_null_switches_the_second_threshold_off(caplog):
    guard(1e6, 1e6, max_logprob_gap=None)
    assert len(caplog.messages) == 1 and "rollout.warn_logprob_gap" in caplog.messages[0]


@pytest.mark.parametrize("sums", [{}, {"tokens": 0.0, "logprob_gap_abs": 0.0, "logprob_gap_max": 0.0}])
def test_a_pass_without_tokens_says_nothing(sums, caplog):
    guard_logprob_gap(sums, RolloutConfig(max_logprob_gap=0.0, warn_logprob_gap=0.0), "float32")
    assert not caplog.messages


@pytest.mark.parametrize("mode", ["sync", "prefetch"])
def test_whoever_goes_on_after_an_error_owes_nothing(mode):
    """A call that ended by too many failed syncs leaves no job behind that a later call would wait for."""
    engine = FakeEngine(answers=(2,), syncs=("whole", "failed", "failed"))
    generation = generation_of(engine, "weight_sync.attempts=2", f"rollout.producer.mode={mode}")
    with pytest.raises(EngineError, match="did not arrive in 2 attempts"):
        generation.produce(NAMED, SAMPLES)
    assert generation.jobs == []
    assert len(generation.produce(NAMED, SAMPLES).rollouts) == len(PROMPTS)
    generation.close()

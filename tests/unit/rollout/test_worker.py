"""The producer's invariants under engines and rewards that fail."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megatron_rl.errors import EngineError
from megatron_rl.rollout.worker import RolloutJob, RolloutWorker
from tests.patience import until
from tests.unit.rollout.fake_engine import (
    BACKGROUND,
    BOUND_S,
    MODES,
    SAMPLES,
    FakeEngine,
    FakeReward,
    end,
    job_of,
    producer_of,
    value_of,
)

SHORT_S = 0.1  # a deadline, where nothing that is waited for ever comes


def collect(producer: RolloutWorker, under_way: Sequence[RolloutJob], job: RolloutJob, places: Sequence[int]) -> int:
    """Wait for places as RolloutManager does; return how often the engine was found lost."""
    times = 0
    while True:
        if producer.config.mode == "sync" and job.missing:
            producer.generate(job)
        producer.wait(job, places)
        if job.lost is None:
            return times
        times += 1
        for other in under_way:
            producer.wait_generated(other)
            if other.lost is not None and producer.config.mode != "sync":
                producer.start(other)


def assert_invariants(producer: RolloutWorker, jobs: list[RolloutJob], engine: FakeEngine, score: FakeReward) -> None:
    """Assert rollout/worker.py's invariants 1, 2 and, by the engine's calls, 4; whoever waited has met the third."""
    wanted = {job.prompts[place].name: number for number, job in enumerate(jobs) for place in job.mine}
    for job in jobs:
        assert set(job.rollouts) == set(job.scores) == set(job.mine)
        for place in job.mine:
            group, name = job.group(place), job.prompts[place].name
            assert [rollout.sample_id for rollout in group.rollouts] == [f"{name}#{k}" for k in range(SAMPLES)]
            assert [score.total for score in group.scores] == [value_of(rollout) for rollout in group.rollouts]
    assert Counter(engine.finished) == Counter(list(wanted))
    assert {name for call in engine.calls for name in call} <= set(wanted)
    names_of_call = [[sample.rpartition("#")[0] for sample in samples[::SAMPLES]] for _, samples in score.calls]
    assert Counter(name for names in names_of_call for name in names) == Counter(list(wanted))
    for (thread, samples), names in zip(score.calls, names_of_call, strict=True):
        assert len(samples) == len(names) * SAMPLES and thread == ("rewards" if producer._apart else "MainThread")
    job_of_call = [{wanted[name] for name in names} for names in names_of_call]
    least = producer.config.min_groups // producer.share[1] if producer.config.mode == "streaming" else len(wanted)
    for k, numbers in enumerate(job_of_call):
        assert len(numbers) == 1 and (numbers not in job_of_call[k + 1 :] or len(names_of_call[k]) >= least)


# without shrinking: to shrink an example that hangs would take hours
@settings(max_examples=120, deadline=None, phases=(Phase.reuse, Phase.generate))
@given(
    mode=st.sampled_from(MODES), apart=st.booleans(), quick=st.booleans(), min_groups=st.integers(1, 4),
    part=st.integers(1, 4), sizes=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    losses=st.lists(st.integers(0, 3), max_size=4), seed=st.integers(0, 10**6), rank=st.integers(0, 2),
)
def test_every_place_is_found_and_scored_once(mode, apart, min_groups, sizes, losses, seed, rank, part, quick):
    """Jobs are queued, the engine is lost up to four times, a job is waited for in parts, by a rank of one or three."""
    engine, score = FakeEngine(seed=seed, losses=losses, group_s=0.0 if quick else 0.001), FakeReward()
    share = (0, 1) if rank == 0 else (rank, 3)
    producer = producer_of(engine, score, mode, apart=apart, min_groups=min_groups, share=share)
    jobs, first = [], 0
    for size in sizes:
        jobs.append(job_of(producer, range(first, first + size)))
        first += size
    for job in jobs if mode != "sync" else ():
        producer.start(job)
    for number, job in enumerate(jobs):
        for start in range(0, len(job.mine), part):
            collect(producer, jobs[number:], job, job.mine[start : start + part])
    assert_invariants(producer, jobs, engine, score)
    end(producer)


@pytest.mark.parametrize(("mode", "apart"), [("sync", True), ("sync", False), *BACKGROUND])
def test_what_a_reward_raises_is_raised_by_wait_and_the_next_job_goes_on(mode, apart):
    engine, score = FakeEngine(), FakeReward(prompt="2@0", error=ValueError("no reward for 2"))
    producer = producer_of(engine, score, mode, apart=apart)
    jobs = [job_of(producer, range(4)), job_of(producer, range(4, 8))]
    for job in jobs if mode != "sync" else ():
        producer.start(job)
    for _ in range(2):  # again, by whoever waits for it again
        with pytest.raises(ValueError, match="no reward for 2"):
            collect(producer, jobs, jobs[0], jobs[0].mine)
    assert 2 not in jobs[0].scores
    collect(producer, jobs, jobs[1], jobs[1].mine)
    assert set(jobs[1].scores) == set(range(4))
    end(producer)


def begun(engine: FakeEngine, score: FakeReward, mode: str, numbers: Sequence[int], **given):
    """Return a producer that gives up a wait after SHORT_S, and a job that it has begun."""
    producer = producer_of(engine, score, mode, deadline_s=SHORT_S, **given)
    job = job_of(producer, numbers)
    producer.start(job)
    return producer, job


def assert_late(wait, *words: str) -> None:
    """Assert that a wait ends in an error by SHORT_S, and not before; one without that deadline takes BOUND_S."""
    started = time.monotonic()
    with pytest.raises(EngineError) as ended:
        wait()
    assert time.monotonic() - started >= SHORT_S
    assert all(word in str(ended.value) for word in (*words, f"run.deadline_s={SHORT_S:g} s")), ended.value


def go_on(producer: RolloutWorker, job: RolloutJob, *held: threading.Event) -> None:
    """Let a job end after its deadline: a rank that is only late is not broken by having been called so."""
    producer.deadline_s = BOUND_S
    for event in held:
        event.set()
    producer.wait(job, job.mine)


@pytest.mark.parametrize(("mode", "apart"), BACKGROUND)
def test_a_wait_for_an_engine_that_hangs_ends_by_its_deadline(mode, apart):
    """The first three groups are there, and the fourth never comes."""
    engine, score = FakeEngine(holds=3), FakeReward()
    producer, job = begun(engine, score, mode, range(5), apart=apart, min_groups=3)
    assert until(lambda: len(job.rollouts) == 3)
    assert_late(lambda: producer.wait(job, [2, 3, 4]), "were not generated", "the first is prompt 3@0")
    assert_late(lambda: producer.wait_generated(job), "were not generated", "the first is prompt 3@0")
    go_on(producer, job, engine.held)
    assert_invariants(producer, [job], engine, score)
    end(producer)


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_wait_for_a_reward_that_hangs_ends_by_its_deadline(mode):
    engine, hold = FakeEngine(), threading.Event()
    score = FakeReward(prompt="1@0", hold=hold)
    producer, job = begun(engine, score, mode, range(4), apart=True, min_groups=4)
    assert until(lambda: score.calls)
    assert_late(lambda: producer.wait(job, [1, 2]), "were not scored", "4 of 4, the first is prompt 0@0")
    assert until(lambda: not job.generating)
    producer.wait_generated(job)  # this does not wait for rewards
    go_on(producer, job, hold)
    end(producer)


def test_a_reward_that_hangs_is_named_while_the_rest_is_generated():
    """In streaming, two groups are being scored, which hangs, and the engine has two more to do."""
    engine, hold = FakeEngine(holds=2), threading.Event()
    score = FakeReward(prompt="1@0", hold=hold)
    producer, job = begun(engine, score, "streaming", range(4), apart=True, min_groups=2)
    assert until(lambda: score.calls)
    assert_late(lambda: producer.wait(job, [0, 1]), "were not scored", "the first is prompt 0@0")
    assert_late(lambda: producer.wait_generated(job), "were not generated", "the first is prompt 2@0")
    go_on(producer, job, hold, engine.held)
    end(producer)


@pytest.mark.parametrize("apart", [True, False])
def test_a_part_too_small_to_be_scored_waits_for_the_engine(apart):
    """In streaming in calls of three groups, a part of two that are there waits for the third."""
    engine = FakeEngine(holds=2)
    producer, job = begun(engine, FakeReward(), "streaming", range(4), apart=apart, min_groups=3)
    assert until(lambda: len(job.rollouts) == 2)
    assert_late(lambda: producer.wait(job, [0, 1]), "were not generated", "the first is prompt 2@0")
    go_on(producer, job, engine.held)
    end(producer)

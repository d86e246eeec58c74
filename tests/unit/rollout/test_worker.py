"""The producer's invariants under engines and rewards that fail."""

import threading
import time
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megatron_rl.errors import EngineError
from megatron_rl.rollout.job import RolloutJob
from megatron_rl.rollout.worker import RolloutWorker
from tests.patience import HANG_S, patient, until
from tests.unit.rollout.fake_engine import BACKGROUND, MODES, SAMPLES, FakeEngine, FakeReward, end, job_of, producer_of

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
            assert list(group.scores) == FakeReward()(group.rollouts)
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


def assert_late(wait, words: str) -> None:
    """Assert that a wait ends in an error by SHORT_S, and not before, with the words, which ``|`` parts."""
    started = time.monotonic()
    with pytest.raises(EngineError) as ended:
        wait()
    assert time.monotonic() - started >= SHORT_S
    words = (*words.split("|"), f"run.deadline_s={SHORT_S:g} s")
    assert all(word in str(ended.value) for word in words), ended.value


@pytest.mark.parametrize(("mode", "apart", "count", "least", "holds", "hangs", "late"), [
    # the first three groups are there, and the fourth never comes
    *((*each, 5, 3, 3, "", dict.fromkeys([(2, 3, 4), None], "generated|is prompt 3@0")) for each in BACKGROUND),
    # all are there, and their reward never comes: whoever waits for what is generated does not wait for it
    *((mode, True, 4, 4, None, "1@0", {(1, 2): "scored|4 of 4, the first is prompt 0@0"}) for mode in MODES[1:]),
    # two groups are being scored, which hangs, and the engine has two more to do
    ("streaming", True, 4, 2, 2, "1@0", {(0, 1): "scored|is prompt 0@0", None: "generated|is prompt 2@0"}),
    # in calls of three groups a part of two that are there waits for the third
    *(("streaming", apart, 4, 3, 2, "", {(0, 1): "generated|is prompt 2@0"}) for apart in (True, False)),
])
def test_a_wait_ends_by_its_deadline_and_names_what_does_not_come(mode, apart, count, least, holds, hangs, late):
    """``late``: by the places that are waited for, None for all that is generated, the words of the error."""
    engine, score = FakeEngine(holds=holds), FakeReward(prompt=hangs, hold=threading.Event())
    producer = producer_of(engine, score, mode, apart=apart, min_groups=least, deadline_s=SHORT_S)
    job = job_of(producer, range(count))
    producer.start(job)
    assert until(lambda: len(job.rollouts) == (holds or count) and (score.calls or not hangs))
    for places, words in late.items():
        assert_late(lambda places=places: producer.wait(job, places) if places else producer.wait_generated(job), words)
    if holds is None:
        assert until(lambda: not job.generating)
        producer.wait_generated(job)
    producer.deadline_s = patient(HANG_S)  # a rank that is only late is not broken by having been called so
    engine.held.set()
    score.hold.set()
    producer.wait(job, job.mine)
    assert_invariants(producer, [job], engine, score)
    end(producer)

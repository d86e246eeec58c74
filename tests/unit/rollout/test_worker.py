"""The producer's invariants under engines that finish in any order, are lost and hang, and under rewards that raise and
hang."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megatron_rl.config import ProducerConfig, load_config
from megatron_rl.errors import EngineError
from megatron_rl.observability.timer import StepTimer
from megatron_rl.rollout import worker as producer_module
from megatron_rl.rollout.engine import NO_WEIGHTS, EngineLost, SyncReport
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.queue import RolloutQueue
from megatron_rl.rollout.worker import RolloutJob, RolloutWorker
from megatron_rl.types import Prompt, Rollout, Score
from tests.patience import HANG_S, patient, until

SAMPLES, BOUND_S = 2, patient(10 * HANG_S)  # longer than any wait for an end
SHORT_S = 0.1  # a deadline, where nothing that is waited for ever comes
MODES = ("sync", "prefetch", "streaming")
BACKGROUND = [(mode, apart) for mode in MODES[1:] for apart in (True, False)]


def prompt_of(number: int) -> Prompt:
    return Prompt(prompt_id=f"{number}@0", text="", token_ids=(5,), columns={})


def group_of(prompt: Prompt) -> list[Rollout]:
    same = {
        "response_ids": (3, 7),
        "logprobs": (-1.0, -2.0),
        "text": "",
        "finish_reason": "stop",
        "weight_versions": ((0, 2),),
    }
    return [Rollout(prompt=prompt, sample_index=index, **same) for index in range(SAMPLES)]


def value_of(rollout: Rollout) -> float:
    return float(int(rollout.prompt.prompt_id.split("@")[0]) * SAMPLES + rollout.sample_index)


class FakeEngine:
    """Groups in an order of its own. losses[k]: how many groups its k-th call finishes before the engine is lost.

    group_s: before each group · finished: names, one each time that a group is finished · held: set to go on, once
    ``holds`` groups are finished.
    """

    def __init__(
        self, *, seed: int = 0, losses: Sequence[int] = (), group_s: float = 0.0, holds: int | None = None
    ) -> None:
        self.random, self.losses, self.group_s, self.holds = random.Random(seed), list(losses), group_s, holds
        self.weight_version, self.lost = NO_WEIGHTS, []
        self.calls: list[list[str]] = []
        self.finished: list[str] = []
        self.held, self.closed = threading.Event(), threading.Event()
        self.on_finished = None

    def generate(
        self, prompts, samples_per_prompt, *, temperature=None, max_tokens=None, on_finished=None
    ) -> list[Rollout]:
        assert samples_per_prompt == SAMPLES
        self.calls.append([prompt.name for prompt in prompts])
        self.on_finished = on_finished
        order = self.random.sample(range(len(prompts)), len(prompts)) if self.holds is None else range(len(prompts))
        limit = self.losses.pop(0) if self.losses else len(prompts)
        done: dict[int, list[Rollout]] = {}
        for k in order:
            if len(done) == limit:
                raise EngineLost("it was killed", finished=done)
            if len(self.finished) == self.holds:
                assert self.held.wait(BOUND_S)
            if self.closed.wait(self.group_s):
                raise RuntimeError("the engine is closed")
            done[k] = group_of(prompts[k])
            self.finished.append(prompts[k].name)
            on_finished(k, done[k])
        return [rollout for k in range(len(prompts)) for rollout in done[k]]

    def recover(self, lost) -> list[str]:
        return []

    def load_weights(self, tensors, version) -> SyncReport:
        return SyncReport(version=version, num_tensors=0, num_bytes=0, seconds=0.0)

    def take_report(self, version, failed, lost) -> None:
        self.weight_version = version

    def sleep(self) -> None: ...

    def wake(self, *, tags) -> None: ...

    def close(self) -> None:
        self.closed.set()


class FakeReward:
    """calls: (name of the thread, sample ids). It meets ``error`` or waits for ``hold`` at the groups of ``prompt``."""

    def __init__(
        self, *, prompt: str = "", error: Exception | None = None, hold: threading.Event | None = None
    ) -> None:
        self.prompt, self.error, self.hold = prompt, error, hold
        self.calls: list[tuple[str, list[str]]] = []

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        self.calls.append((threading.current_thread().name, [rollout.sample_id for rollout in rollouts]))
        if self.prompt in {rollout.prompt.name for rollout in rollouts}:
            if self.hold is not None:
                assert self.hold.wait(BOUND_S)
            if self.error is not None:
                raise self.error
        return [Score(total=value_of(rollout), by_function=()) for rollout in rollouts]


def producer_of(
    engine: FakeEngine,
    score: FakeReward,
    mode: str,
    *,
    apart: bool,
    min_groups: int = 1,
    share=(0, 1),
    deadline_s=BOUND_S,
):
    return RolloutWorker(
        engine, score, ProducerConfig(mode=mode, min_groups=min_groups), apart=apart, share=share, deadline_s=deadline_s
    )


def job_of(producer: RolloutWorker, numbers: Sequence[int]) -> RolloutJob:
    return RolloutJob(
        {place: prompt_of(number) for place, number in enumerate(numbers)}, producer.places(len(numbers)), SAMPLES
    )


def end(producer: RolloutWorker) -> None:
    """Close it; its threads end."""
    producer.engine.close()
    producer.close()
    assert until(lambda: not any(thread.is_alive() for thread in producer._threads))


def collect(producer: RolloutWorker, under_way: Sequence[RolloutJob], job: RolloutJob, places: Sequence[int]) -> int:
    """As RolloutManager does it; how often the engine was found lost."""
    times = 0
    while True:
        if producer.config.mode == "sync" and job.missing:
            producer.generate(job)
        producer.wait(job, places)
        if job.lost is None:
            return times
        times += 1
        for other in under_way:
            producer.drain(other)
            if other.lost is not None and producer.config.mode != "sync":
                producer.start(other)


def assert_invariants(
    producer: RolloutWorker, jobs: Sequence[RolloutJob], engine: FakeEngine, score: FakeReward
) -> None:
    """1 and 2 of the module; 3 is met by whoever waited; 4 by the engine's calls."""
    wanted = {job.prompts[place].name: number for number, job in enumerate(jobs) for place in job.mine}
    for job in jobs:
        assert set(job.found) == set(job.scores) == set(job.mine)
        for place in job.mine:
            group = job.group(place)
            assert [rollout.sample_id for rollout in group.rollouts] == [
                f"{job.prompts[place].name}#{k}" for k in range(SAMPLES)
            ]
            assert [score.total for score in group.scores] == [value_of(rollout) for rollout in group.rollouts]
    assert Counter(engine.finished) == Counter(list(wanted))
    assert {name for call in engine.calls for name in call} <= set(wanted)
    groups_of_call = [[sample.rpartition("#")[0] for sample in samples[::SAMPLES]] for _, samples in score.calls]
    assert Counter(name for names in groups_of_call for name in names) == Counter(list(wanted))
    assert all(
        len(samples) == len(names) * SAMPLES for (_, samples), names in zip(score.calls, groups_of_call, strict=True)
    )
    call_of_job = [{wanted[name] for name in names} for names in groups_of_call]
    assert all(len(numbers) == 1 for numbers in call_of_job)
    for k, names in enumerate(groups_of_call):
        is_last = call_of_job[k] not in call_of_job[k + 1 :]
        assert is_last or (
            producer.config.mode == "streaming" and len(names) >= producer.config.min_groups // producer.share[1]
        ), groups_of_call
    assert {name for name, _ in score.calls} <= {"rewards" if producer._apart else "MainThread"}


@settings(
    max_examples=120, deadline=None, phases=(Phase.reuse, Phase.generate)
)  # to shrink one that hangs would take hours
@given(
    mode=st.sampled_from(MODES),
    apart=st.booleans(),
    quick=st.booleans(),
    min_groups=st.integers(1, 4),
    part=st.integers(1, 4),
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    losses=st.lists(st.integers(0, 3), max_size=4),
    seed=st.integers(0, 10**6),
    rank=st.integers(0, 2),
)
def test_every_place_is_found_and_scored_once(mode, apart, min_groups, sizes, losses, seed, rank, part, quick):
    """Jobs queued behind one another, an engine that is lost up to four times, one rank of one or of three, waited for
    in parts."""
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
def test_an_engine_lost_twice_in_one_job(mode, apart):
    """Seven groups: two, then one, then the rest; what is finished is not asked for again."""
    engine, score = FakeEngine(losses=(2, 1)), FakeReward()
    producer = producer_of(engine, score, mode, apart=apart, min_groups=2)
    job = job_of(producer, range(7))
    if mode != "sync":
        producer.start(job)
    assert collect(producer, [job], job, job.mine) == 2
    assert [len(call) for call in engine.calls] == [7, 5, 4]
    assert_invariants(producer, [job], engine, score)
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


def assert_late(wait, *words: str) -> None:
    """What it waits for would take BOUND_S; it ends by SHORT_S, and not before."""
    started = time.monotonic()
    with pytest.raises(EngineError) as ended:
        wait()
    assert time.monotonic() - started >= SHORT_S
    assert all(word in str(ended.value) for word in (*words, f"run.deadline_s={SHORT_S:g} s")), ended.value


def go_on(producer: RolloutWorker, job: RolloutJob, *held: threading.Event) -> None:
    """A rank that is only late is not broken by having been called so."""
    producer.deadline_s = BOUND_S
    for event in held:
        event.set()
    producer.wait(job, job.mine)


@pytest.mark.parametrize(("mode", "apart"), BACKGROUND)
def test_a_wait_for_an_engine_that_hangs_ends_by_its_deadline(mode, apart):
    """The first three groups are there, and the fourth never comes."""
    engine, score = FakeEngine(holds=3), FakeReward()
    producer = producer_of(engine, score, mode, apart=apart, min_groups=3, deadline_s=SHORT_S)
    job = job_of(producer, range(5))
    producer.start(job)
    assert until(lambda: len(job.found) == 3)
    assert_late(lambda: producer.wait(job, [2, 3, 4]), "were not generated", "the first is prompt 3@0")
    assert_late(lambda: producer.drain(job), "were not generated", "the first is prompt 3@0")
    go_on(producer, job, engine.held)
    assert_invariants(producer, [job], engine, score)
    end(producer)


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_wait_for_a_reward_that_hangs_ends_by_its_deadline(mode):
    engine, hold = FakeEngine(), threading.Event()
    score = FakeReward(prompt="1@0", hold=hold)
    producer = producer_of(engine, score, mode, apart=True, min_groups=4, deadline_s=SHORT_S)
    job = job_of(producer, range(4))
    producer.start(job)
    assert until(lambda: score.calls)
    assert_late(lambda: producer.wait(job, [1, 2]), "were not scored", "4 of 4, the first is prompt 0@0")
    assert until(lambda: not job.generating)
    producer.drain(job)  # which does not wait for rewards
    go_on(producer, job, hold)
    end(producer)


def test_a_reward_that_hangs_is_named_while_the_rest_is_generated():
    """Streaming: two groups are scored, which hangs, and the engine has two more to do."""
    engine, hold = FakeEngine(holds=2), threading.Event()
    score = FakeReward(prompt="1@0", hold=hold)
    producer = producer_of(engine, score, "streaming", apart=True, min_groups=2, deadline_s=SHORT_S)
    job = job_of(producer, range(4))
    producer.start(job)
    assert until(lambda: score.calls)
    assert_late(lambda: producer.wait(job, [0, 1]), "were not scored", "the first is prompt 0@0")
    assert_late(lambda: producer.drain(job), "were not generated", "the first is prompt 2@0")
    go_on(producer, job, hold, engine.held)
    end(producer)


@pytest.mark.parametrize("apart", [True, False])
def test_a_part_too_small_to_be_scored_waits_for_the_engine(apart):
    """Streaming in calls of three groups, and a part of two that are there: what it waits for is the third."""
    engine = FakeEngine(holds=2)
    producer = producer_of(engine, FakeReward(), "streaming", apart=apart, min_groups=3, deadline_s=SHORT_S)
    job = job_of(producer, range(4))
    producer.start(job)
    assert until(lambda: len(job.found) == 2)
    assert_late(lambda: producer.wait(job, [0, 1]), "were not generated", "the first is prompt 2@0")
    go_on(producer, job, engine.held)
    end(producer)


class Counted(threading.Condition):
    entries = 0

    def __enter__(self) -> bool:
        self.entries += 1
        return super().__enter__()


@pytest.mark.parametrize(("mode", "apart"), BACKGROUND)
def test_a_wait_takes_no_processor_time(mode, apart):
    """A fifth of a second for an engine that sleeps: what looks at the job all the while does so thousands of times."""
    engine, score = FakeEngine(holds=1), FakeReward()
    producer = producer_of(engine, score, mode, apart=apart)
    job, timer = job_of(producer, range(2)), threading.Timer(0.2, engine.held.set)
    job.change = Counted()
    producer.start(job)
    timer.start()
    producer.wait(job, [1])
    assert (
        job.change.entries <= 20
    )  # some for each thing that happens to a job of two groups, none for the ticks of a clock
    timer.join()
    end(producer)


# ---- its end
# -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "apart"), BACKGROUND)
def test_close_ends_the_threads_amid_jobs(mode, apart):
    engine = FakeEngine(group_s=BOUND_S)
    producer = producer_of(engine, FakeReward(), mode, apart=apart)
    jobs = [job_of(producer, range(40)), job_of(producer, range(40, 80))]
    for job in jobs:
        producer.start(job)
    producer.wait(jobs[0], [])  # returns at once
    names = {thread.name for thread in producer._threads}
    assert names == ({"rollouts", "rewards"} if apart else {"rollouts"}) and all(
        thread.is_alive() for thread in producer._threads
    )
    end(producer)
    producer.close()  # again is harmless
    with pytest.raises(RuntimeError, match="the engine is closed"):
        producer.wait(jobs[0], jobs[0].mine)


@pytest.mark.parametrize(("mode", "apart"), BACKGROUND)
def test_a_callback_after_close_hangs_nobody(mode, apart, monkeypatch):
    """An engine that does not hear that it is closed, and finishes a group later."""
    monkeypatch.setattr(producer_module, "CLOSE_S", 0.1)
    engine, score = FakeEngine(holds=1), FakeReward()
    producer = producer_of(engine, score, mode, apart=apart)
    job = job_of(producer, range(3))
    producer.start(job)
    assert until(lambda: job.found)
    producer.close()
    assert producer._threads[0].is_alive()  # close did not wait for it
    engine.held.set()
    assert until(lambda: not any(thread.is_alive() for thread in producer._threads))
    assert set(job.found) == {0, 1, 2}
    late = threading.Thread(target=engine.on_finished, args=(0, group_of(prompt_of(0))), daemon=True)
    late.start()
    assert until(lambda: not late.is_alive())


# ---- no more than what was started
# -------------------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("mode", "depth"), [("sync", 1), ("prefetch", 1), ("prefetch", 3), ("streaming", 2)])
def test_a_slow_consumer_bounds_what_is_held(alone, mode, depth):
    """A feed over an engine that takes no time: depth + 1 rollouts are held at most, and in a slow loop that many
    are."""
    prompts_per_rollout, turns = 4, 6
    overrides = [
        f"train.prompts_per_rollout={prompts_per_rollout}",
        f"train.num_rollouts={turns}",
        f"rollout.samples_per_prompt={SAMPLES}",
    ]
    producing = [
        f"rollout.producer.mode={mode}",
        f"rollout.producer.prefetch_rollouts={depth}",
        "rollout.producer.min_groups=2",
    ]
    config, engine, trainer = load_config(None, overrides + producing), FakeEngine(), SimpleNamespace(weight_version=0)
    weights = {"export": lambda: iter([("weight", torch.zeros(1))]), "version": lambda: trainer.weight_version}
    generation = RolloutManager(engine, FakeReward(), config, share=(0, 1), **weights)
    given = {"passes_parts": False, "passes_all": False, "steps_per_rollout": 1}
    numbers = itertools.count()
    prompts = SimpleNamespace(next=lambda count, epochs: [prompt_of(next(numbers)) for _ in range(count)])
    timer = StepTimer(lambda stage: contextlib.nullcontext())
    feed = RolloutQueue(config, trainer, generation, prompts, timer, **given)
    held, ahead = [], 0 if mode == "sync" else depth
    for turn in range(turns):
        feed.start_ahead(turn)
        generation.collect(feed.jobs[turn], range(prompts_per_rollout))
        generation.finish(feed.jobs[turn])
        for _ in range(3):  # asked again and again it starts no more
            feed.start_ahead(turn)
        assert until(lambda turn=turn: len(engine.finished) >= min(turn + 1 + ahead, turns) * prompts_per_rollout)
        time.sleep(0.02)  # for more than that, which there must not be
        held.append(len(engine.finished) - turn * prompts_per_rollout)
        assert len(feed.jobs) == min(ahead + 1, turns - turn)
        feed._drop_stale(turn, set(range(prompts_per_rollout)))
        trainer.weight_version += 1
    assert max(held) == (ahead + 1) * prompts_per_rollout and len(engine.finished) == turns * prompts_per_rollout
    generation.close()

"""rollout/worker.py's end, its waits, long ones too while an engine computes, and how much it holds."""

import contextlib
import functools
import itertools
import math
import threading
import time
from types import SimpleNamespace

import pytest

from megatron_rl.config import load_config
from megatron_rl.errors import EngineError, PeerError
from megatron_rl.observability.timer import StepTimer
from megatron_rl.rollout import worker as producer_module
from megatron_rl.rollout.manager import PARTS
from megatron_rl.trainer.rollouts import build_queue
from tests.patience import until
from tests.unit.rollout import fake_engine
from tests.unit.rollout.fake_engine import BACKGROUND, FakeEngine, FakeReward, end, job_of, manager_of, producer_of


class Counted(threading.Condition):
    entries = 0

    def __enter__(self) -> bool:
        self.entries += 1
        return super().__enter__()


@pytest.mark.parametrize(("mode", "apart"), BACKGROUND)
def test_a_wait_takes_no_processor_time(mode, apart):
    """An engine sleeps for a fifth of a second, in which a loop would look at the job thousands of times."""
    engine, score = FakeEngine(holds=1), FakeReward()
    producer = producer_of(engine, score, mode, apart=apart)
    job, timer = job_of(producer, range(2)), threading.Timer(0.2, engine.held.set)
    job.change = Counted()
    producer.start(job)
    timer.start()
    producer.wait(job, [1])
    # some entries for each thing that happens to a job of two groups, none for the ticks of a clock
    assert job.change.entries <= 20
    timer.join()
    end(producer)


@pytest.mark.parametrize(("mode", "apart"), BACKGROUND)
def test_close_ends_the_threads_amid_jobs(mode, apart):
    engine = FakeEngine(group_s=fake_engine.BOUND_S)
    producer = producer_of(engine, FakeReward(), mode, apart=apart)
    jobs = [job_of(producer, range(40)), job_of(producer, range(40, 80))]
    for job in jobs:
        producer.start(job)
    producer.wait(jobs[0], [])  # returns at once
    names = {thread.name for thread in producer._threads if thread.is_alive()}
    assert names == ({"rollouts", "rewards"} if apart else {"rollouts"}) and len(producer._threads) == len(names)
    end(producer)
    producer.close()  # again is harmless
    with pytest.raises(RuntimeError, match="the engine is closed"):
        producer.wait(jobs[0], jobs[0].mine)


@pytest.mark.parametrize(("mode", "apart"), BACKGROUND)
def test_a_callback_after_close_hangs_nobody(mode, apart, monkeypatch):
    """The engine does not hear that it is closed, and finishes a group later."""
    monkeypatch.setattr(producer_module, "CLOSE_S", 0.1)
    engine, score = FakeEngine(holds=1), FakeReward()
    producer = producer_of(engine, score, mode, apart=apart)
    job = job_of(producer, range(3))
    producer.start(job)
    assert until(lambda: job.rollouts)
    producer.close()
    assert producer._threads[0].is_alive()  # close did not wait for it
    engine.held.set()
    assert until(lambda: not any(thread.is_alive() for thread in producer._threads))
    assert set(job.rollouts) == {0, 1, 2}
    group = fake_engine.group_of(fake_engine.prompt_of(0))
    late = threading.Thread(target=engine.on_finished, args=(0, group), daemon=True)
    late.start()
    assert until(lambda: not late.is_alive())


@pytest.mark.parametrize(("mode", "depth"), [("sync", 1), ("prefetch", 1), ("prefetch", 3), ("streaming", 2)])
def test_a_slow_consumer_bounds_what_is_held(alone, mode, depth):
    """Of an engine that takes no time, depth + 1 rollouts are held at most, and in a slow loop that many."""
    size, turns, producer = 4, 6, "rollout.producer"
    sizes = [f"train.prompts_per_rollout={size}", f"train.num_rollouts={turns}"]
    modes = [f"{producer}.mode={mode}", f"{producer}.prefetch_rollouts={depth}", f"{producer}.min_groups=2"]
    engine, trainer, numbers = FakeEngine(), SimpleNamespace(weight_version=0), itertools.count()
    overrides = [*sizes, *modes, f"rollout.samples_per_prompt={fake_engine.SAMPLES}"]
    generation = manager_of(engine, *overrides, score=FakeReward(), version=lambda: trainer.weight_version)
    prompts = SimpleNamespace(next=lambda count, epochs: [fake_engine.prompt_of(next(numbers)) for _ in range(count)])
    timer = StepTimer(lambda stage: contextlib.nullcontext())
    config = load_config(None, overrides)
    feed = build_queue(config, trainer, generation, prompts, timer, passes_parts=False, passes_all=False)
    held, ahead = [], 0 if mode == "sync" else depth
    for turn in range(turns):
        feed.start_ahead(turn)
        generation.collect(feed.jobs[turn], range(size))
        generation.finish(feed.jobs[turn])
        for _ in range(3):  # asked again and again, it starts no more
            feed.start_ahead(turn)
        started = min(turn + 1 + ahead, turns)
        assert len(feed.jobs) == started - turn
        assert until(lambda: all(not job.missing and not job.generating for job in generation.jobs))  # nothing is left
        held.append(len(engine.finished) - turn * size)
        assert len(engine.finished) == started * size
        feed._drop_stale(turn, set(range(size)))
        trainer.weight_version += 1
    assert max(held) == (ahead + 1) * size and len(engine.finished) == turns * size
    generation.close()


# ---- a rollout may take longer than run.deadline_s while an engine says that it computes, on every rank -------------

LONG_AGO, DEADLINE_S = -1e9, 1.0


def test_a_wait_lasts_as_long_as_the_engine_says_that_it_computes():
    """A wait that began long ago goes on after an engine's word, and ends by its deadline where none comes."""
    engine = FakeEngine(holds=1)
    producer = producer_of(engine, FakeReward(), "prefetch", apart=False, deadline_s=DEADLINE_S)
    job = job_of(producer, range(3))
    producer.start(job)
    for wait in (functools.partial(producer.wait, job, job.mine), functools.partial(producer.wait_generated, job)):
        engine.progressed_at = math.inf
        assert not wait(since=LONG_AGO, most_s=0.01)
        engine.progressed_at = producer._progressed_at = LONG_AGO
        with pytest.raises(EngineError, match="not generated within run.deadline_s=1 s, and no engine reported"):
            wait(since=LONG_AGO)
    engine.held.set()
    assert producer.wait(job, job.mine) and producer.wait_generated(job)
    end(producer)


def produce(rank: int, world: int, speaks: bool) -> str:
    """Over an engine that finishes once the ranks have met for longer than run.deadline_s, and speaks or not."""
    engine = FakeEngine(holds=0)
    engine.weight_version, engine.progressed_at = 1, math.inf if speaks else LONG_AGO
    share = (0, 1) if rank == 0 else None
    manager = manager_of(engine, f"run.deadline_s={DEADLINE_S:g}", version=lambda: 1, share=share)
    together, meetings = manager._together, []

    def counted(act) -> None:
        together(act)
        meetings.append(time.monotonic())
        if len(meetings) > 2 * PARTS:
            engine.held.set()

    manager._together = counted
    try:
        job = manager.produce(fake_engine.prompts_of(range(2)), 2)
        return f"{len(job.scores)} groups after {len(meetings) > 2 * PARTS}"
    except (EngineError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.held.set()
        manager.close()


@pytest.mark.parametrize("speaks", [True, False])
def test_no_rank_waits_for_another_longer_than_until_the_next_meeting(pool, speaks):
    """A rank without an engine waits with the others for twice the deadline; a mute engine ends both by it."""
    found = pool.run(2, produce, speaks)
    if speaks:
        assert found == ["2 groups after True", "0 groups after True"]
    else:
        assert "were not generated within run.deadline_s=1 s" in found[0] and found[0].startswith("EngineError")
        assert found[1].startswith("PeerError: rank 0 stopped with EngineError")

"""rollout/worker.py's end, its waits, and how much it holds."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_rl.config import load_config
from megatron_rl.observability.timer import StepTimer
from megatron_rl.rollout import worker as producer_module
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.queue import RolloutQueue
from tests.patience import until
from tests.unit.rollout.fake_engine import (
    BACKGROUND,
    BOUND_S,
    SAMPLES,
    FakeEngine,
    FakeReward,
    end,
    group_of,
    job_of,
    producer_of,
    prompt_of,
)


class Counted(threading.Condition):
    entries = 0

    def __enter__(self) -> bool:
        self.entries += 1
        return super().__enter__()


@pytest.mark.parametrize(("mode", "apart"), BACKGROUND)
def test_a_wait_takes_no_processor_time(mode, apart):
    """A wait takes no processor time while an engine sleeps for a fifth of a second.

    A loop that looked at the job all the while would do so thousands of times.
    """
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
    """A callback after close hangs nobody.

    The engine does not hear that it is closed, and finishes a group later.
    """
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
    late = threading.Thread(target=engine.on_finished, args=(0, group_of(prompt_of(0))), daemon=True)
    late.start()
    assert until(lambda: not late.is_alive())


@pytest.fixture
def alone() -> Iterator[None]:
    """Make a world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("mode", "depth"), [("sync", 1), ("prefetch", 1), ("prefetch", 3), ("streaming", 2)])
def test_a_slow_consumer_bounds_what_is_held(alone, mode, depth):
    """A slow consumer bounds the rollouts held: depth + 1 at most, and in a slow loop that many.

    The queue is over an engine that takes no time.
    """
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
        for _ in range(3):  # asked again and again, it starts no more
            feed.start_ahead(turn)
        assert until(lambda turn=turn: len(engine.finished) >= min(turn + 1 + ahead, turns) * prompts_per_rollout)
        time.sleep(0.02)  # time for more groups than that, which there must not be
        held.append(len(engine.finished) - turn * prompts_per_rollout)
        assert len(feed.jobs) == min(ahead + 1, turns - turn)
        feed._drop_stale(turn, set(range(prompts_per_rollout)))
        trainer.weight_version += 1
    assert max(held) == (ahead + 1) * prompts_per_rollout and len(engine.finished) == turns * prompts_per_rollout
    generation.close()

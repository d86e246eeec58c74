"""A rollout may take longer than run.deadline_s while an engine says that it computes, on every rank."""

from __future__ import annotations

import functools
import math
import time

import pytest

from megatron_rl.errors import EngineError, PeerError
from megatron_rl.rollout.manager import PARTS
from tests.unit.rollout.fake_engine import FakeEngine, FakeReward, end, job_of, manager_of, producer_of, prompts_of

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
        with pytest.raises(EngineError, match="not generated in run.deadline_s=1 s, in which no engine said"):
            wait(since=LONG_AGO)
    engine.held.set()
    assert producer.wait(job, job.mine) and producer.wait_generated(job)
    end(producer)


class LateEngine(FakeEngine):
    """Says that it computes, and finishes once its ranks have met for longer than run.deadline_s; or says nothing."""

    def __init__(self, *, speaks: bool) -> None:
        super().__init__(holds=0)
        self.speaks, self.weight_version = speaks, 1

    @property
    def progressed_at(self) -> float:
        return time.monotonic() if self.speaks else LONG_AGO

    @progressed_at.setter
    def progressed_at(self, _: float) -> None: ...


def produce(rank: int, world: int, speaks: bool) -> str:
    engine = LateEngine(speaks=speaks)
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
        job = manager.produce(prompts_of(range(2)), 2)
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
        assert "were not generated in run.deadline_s=1 s" in found[0] and found[0].startswith("EngineError")
        assert found[1].startswith("PeerError: rank 0 stopped with EngineError")

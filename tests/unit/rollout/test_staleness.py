"""The rollouts that may be started, over every state of the counters and over whole runs of them."""

import math

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rollout.engines.engine import NO_WEIGHTS
from megatron_rl.rollout.staleness import Start, may_start

SMALL = st.integers(0, 6)


def assert_invariants(*, trained, engine, between, max_staleness_steps, steps_per_rollout, **more) -> None:
    given = dict(trained=trained, engine=engine, max_staleness_steps=max_staleness_steps, **more)
    given["steps_per_rollout"] = steps_per_rollout
    most = math.inf if max_staleness_steps is None else max_staleness_steps
    at = trained + between * steps_per_rollout  # the trainer's version at the rollout's turn
    found = may_start(between=between, **given)
    held = {Start.NOW: engine, Start.AFTER_SYNC: trained}.get(found)
    assert held is None or at - held <= most
    assert between or found is not Start.LATER
    behind = engine == NO_WEIGHTS or more["renew"] or trained - engine >= more["interval"]
    assert found is not Start.AFTER_SYNC or behind or at - engine > most
    assert found is not Start.NOW or not behind
    if between:
        assert found is Start.LATER or may_start(between=between - 1, **given) is not Start.LATER


@given(
    trained=st.integers(0, 9), lag=st.none() | st.integers(0, 9), between=SMALL, steps_per_rollout=st.integers(1, 4),
    max_staleness_steps=st.none() | SMALL, interval=st.integers(1, 6), renew=st.booleans(),
)
def test_every_state(trained, lag, **state):
    """lag: of the engine behind the trainer; None: it has no weights."""
    assert_invariants(trained=trained, engine=NO_WEIGHTS if lag is None else max(0, trained - lag), **state)


def staleness_of_a_run(*, rollouts, depth, steps, bound: int | None, interval, moved: list[int]) -> list[int]:
    """Return the staleness of each rollout of a run at its turn; moved[k]: rollout k's steps that moved the weights."""
    version, engine, started, found = 0, NO_WEIGHTS, {}, []
    for turn in range(rollouts):
        for number in range(turn, min(rollouts, turn + depth + 1)):
            if number in started:
                continue
            state = dict(trained=version, engine=engine, between=number - turn, steps_per_rollout=steps)
            decision = may_start(**state, max_staleness_steps=bound, interval=interval)
            if decision is Start.LATER:
                break
            engine = version if decision is Start.AFTER_SYNC else engine
            started[number] = engine
        found.append(version - started[turn])
        version += moved[turn]
    return found


@given(
    depth=st.integers(0, 4), steps=st.integers(1, 3), bound=st.none() | st.integers(0, 8), interval=st.integers(1, 5),
    data=st.data(),
)
def test_no_rollout_of_a_run_is_older_than_allowed(depth, steps, bound, interval, data):
    moved = data.draw(st.lists(st.integers(0, steps), min_size=12, max_size=12))
    found = staleness_of_a_run(rollouts=12, depth=depth, steps=steps, bound=bound, interval=interval, moved=moved)
    most = depth * steps + interval - 1
    assert max(found) <= (most if bound is None else min(bound, most))


def test_one_ahead_is_one_rollout_stale():
    assert staleness_of_a_run(rollouts=5, depth=1, steps=2, bound=None, interval=1, moved=[2] * 5) == [0, 2, 2, 2, 2]

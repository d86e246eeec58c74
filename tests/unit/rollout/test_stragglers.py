"""Rollouts that leave groups under way: nothing is lost, nothing is trained twice, and each trains as many groups."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.rollout.groups.stragglers import choose, collect_most, hand_out, num_to_start, num_to_train
from megatron_rl.rollout.job import RolloutJob
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.types import Prompt
from megatron_rl.validate import rollouts, validate_config
from tests.patience import until
from tests.unit.rollout.fake_engine import SAMPLES, FakeEngine, FakeReward, group_of, manager_of, prompt_of, prompts_of

ON = (
    "rollout.engine=vllm", "rollout.producer.mode=prefetch", "weight_sync.in_flight=true",
    "train.prompts_per_rollout=8", "rollout.producer.straggler_share=0.25",
)
OTHERS = {"rollout.producer.mode": "sync", "environment.name": "calculator", "rollout.producer.max_staleness_steps": 0}


def job_of(manager: RolloutManager, prompts: dict[int, Prompt]) -> RolloutJob:
    return manager.job(prompts, dict.fromkeys(prompts, SAMPLES))


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.integers(1, 12), share=st.floats(0, 0.5), num_rollouts=st.integers(1, 7), ahead=st.integers(1, 3),
    rows=st.one_of(st.none(), st.integers(1, 60)), random=st.randoms(use_true_random=False),
)
def test_every_group_is_trained_once_in_its_rollout_or_the_next(prompts, share, num_rollouts, ahead, rows, random):
    """Of a naive run; rows: prompts of data that end, as under ``train.epochs``; None: ``num_rollouts`` rollouts."""
    stragglers = int(share * prompts)
    sizes = {"prompts_per_rollout": prompts, "stragglers": stragglers}
    drawn, started, trained, left = 0, {}, [], []
    index = 0
    while True:
        last = rows is None and index == num_rollouts
        if last or (rows is not None and drawn == rows and not started and not left):
            break
        for number in range(index, index + ahead + 1):
            outstanding = sum(map(len, started.values())) + len(left)
            more = number < num_rollouts if rows is None else drawn < rows or outstanding > (number - index) * prompts
            if number in started or not more:
                continue
            is_last = rows is None and number == num_rollouts - 1
            room = num_to_start(**sizes, rollouts=number - index + 1, outstanding=outstanding, is_last=is_last)
            room = room if rows is None else min(room, rows - drawn)
            started[number] = list(range(drawn, drawn + room))
            drawn += room
        own = started.pop(index)
        count = num_to_train(prompts_per_rollout=prompts, left=len(left), started=len(own))
        whole = random.sample(own, random.randint(count - len(left), len(own)))
        assert choose(whole[: count - len(left)][1:], count - len(left)) is None or count == len(left)
        chosen = choose(whole, count - len(left))
        trained.append([*left, *chosen])
        assert set(chosen) <= set(whole) and (rows is not None or len(trained[-1]) == prompts)
        assert len(trained[-1]) == prompts or drawn == rows
        left = [group for group in own if group not in chosen]
        assert len(left) <= stragglers
        index += 1
    assert not left and not started
    assert sorted(group for groups in trained for group in groups) == list(range(drawn))
    assert drawn == (num_rollouts * prompts if rows is None else rows)


def rows_of(job: RolloutJob) -> list[int]:
    """Return the numbers of a job's prompts, in the order of their places."""
    return [int(prompt.name.removesuffix("@0")) for _, prompt in sorted(job.prompts.items())]


def test_handed_out_groups_and_those_that_stay_equal_the_job():
    """The new job has the groups of the old one and of its predecessor, numbered anew; the rest keeps its places."""
    left, job = RolloutJob({1: prompt_of(7), 5: prompt_of(8)}, (5,), {1: SAMPLES, 5: SAMPLES}), None
    left.put(5, group_of(prompt_of(8)), ["b"])
    job = RolloutJob({place: prompt_of(place) for place in (2, 0, 1, 3)}, (2, 0), dict.fromkeys(range(4), SAMPLES))
    job.rollouts[0], job.scores[0], job.ended_s[0] = group_of(prompt_of(0)), ["c"], 2.5
    whole = hand_out(job, left, [0, 3])
    assert rows_of(whole) == [7, 8, 0, 3]
    assert whole.mine == (1, 2) and whole.scores == {1: ["b"], 2: ["c"]} and whole.ended_s == {2: 2.5}
    assert whole.rollouts[2] == group_of(prompt_of(0))
    assert sorted(job.prompts) == [1, 2] and job.mine == (2,) == tuple(job.missing) and not left.prompts


@pytest.mark.parametrize("apart", [True, False])
def test_a_rollout_is_handed_out_while_its_stragglers_go_on(alone, apart):
    """The second rollout is generated beside them, waits for them, trains them first, and leaves its own."""
    engine, reward = FakeEngine(last={"1@0", "4@0"}), FakeReward()
    manager = manager_of(engine, *ON, score=reward, apart=apart)
    manager.sync_weights()
    first, second = (job_of(manager, prompts_of(numbers)) for numbers in (range(10), range(10, 18)))
    manager.start(first)
    manager.start(second)
    whole, _ = collect_most(manager, first, None, 8)
    manager.finish(whole)
    assert rows_of(whole) == [0, 2, 3, 5, 6, 7, 8, 9]
    assert sorted(first.prompts) == [1, 4] and first.generating
    assert until(lambda: len(engine.calls) == 2 and not second.missing)  # beside the held groups
    engine.held.set()
    whole, _ = collect_most(manager, second, first, 8)
    manager.finish(whole)
    assert rows_of(whole) == [1, 4, *range(10, 16)]
    assert all(len(whole.scores[place]) == SAMPLES for place in range(8))
    assert sorted(second.prompts) == [6, 7] and manager.jobs == [second]
    manager.settle()
    whole, _ = collect_most(manager, job_of(manager, {}), second, 2)
    assert rows_of(whole) == [16, 17]
    scored = [name for _, names in reward.calls for name in names]
    assert len(scored) == len(set(scored)) == 18 * SAMPLES
    manager.close()


def test_a_straggler_whose_engine_is_lost_is_asked_again(alone):
    """The engine dies after 3 of 4 groups, those of the first hand-out; the straggler comes with the next rollout."""
    engine = FakeEngine(losses=[3], holds=10**9)
    manager = manager_of(engine, *ON, "train.prompts_per_rollout=4", score=FakeReward())
    manager.sync_weights()
    first = job_of(manager, prompts_of(range(4)))
    manager.start(first)
    whole, _ = collect_most(manager, first, None, 3)
    assert sorted(whole.rollouts) == [0, 1, 2] and sorted(first.prompts) == [3]
    second = job_of(manager, prompts_of([9]))
    manager.start(second)
    whole, _ = collect_most(manager, second, first, 2)
    assert sorted(engine.finished) == ["0@0", "1@0", "2@0", "3@0", "9@0"] and not second.prompts
    assert rows_of(whole) == [3, 9]
    manager.close()


def test_what_cannot_leave_groups_under_way_is_refused_by_name():
    validate_config(load_config(None, list(ON)), rollouts.stragglers)
    named = ("rollout.producer.min_groups=2", "rollout.dynamic_sampling.max_rounds=1", "weight_sync.in_flight=false")
    words = {name: name for name in named} | {"train.prompts_per_rollout=3": "less than one group"}
    words |= {f"{name}={value}": f"{name}=" for name, value in OTHERS.items()}
    for given_, word in words.items():
        with pytest.raises(ConfigError, match="straggler_share=0.25") as refused:
            validate_config(load_config(None, [*ON, given_]), rollouts.stragglers)
        assert word in str(refused.value)

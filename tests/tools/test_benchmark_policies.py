"""Checks the plans of tools/benchmarks/policies.py, by hand and on random batches, and where each trajectory ends."""

import functools
import json

import numpy as np
import policies as tool
import policies_plans as plans
import policies_run as run
import pytest
import torch

from megatron_rl.backend.batch import Batch
from megatron_rl.planning.cost import CostModel, StageCost
from megatron_rl.planning.plan import PlanRules, split_mini_batches
from megatron_rl.types import BatchFacts, BatchPlan, StepKind, StepPlan
from tests.equality.rig import open_rig, ragged_advantages, sizes
from tests.pairwise import quick
from tests.tools import words
from tests.workers.pool import Pool

Case = tuple[list[np.ndarray], np.ndarray, np.ndarray, PlanRules]


@functools.cache
def cases() -> list[Case]:
    """Return ragged batches in even mini-batches, shares of signal from none to all, with rules to plan them by."""
    found = []
    for seed in range(60):
        random = np.random.default_rng(seed)
        data_size, steps = int(random.choice([1, 2, 4])), int(random.integers(1, 6))
        size = data_size * int(random.integers(1, 7))
        count = size * steps
        signal = random.random(count) < random.choice([0.0, 0.1, 0.3, 0.7, 1.0])
        stage = StageCost(overhead=20.0, token=1.0, square=0.0)
        given = dict(lockstep_ranks=[1, data_size], max_tokens=[33, 80, 1000], microbatch_multiple=[1, 1, 2])
        drawn = {name: int(random.choice(values)) for name, values in given.items()}
        rules = PlanRules(data_size=data_size, cost=CostModel(stages=(stage,) * int(random.integers(1, 4))), **drawn)
        found.append((split_mini_batches(np.arange(count), size), random.integers(1, 70, count), signal, rules))
    return found


def ran(plan: StepPlan, rules: PlanRules) -> list[int]:
    """Return the samples that run with their loss, over all ranks."""
    microbatches = (m for rank in range(rules.data_size) for m in plan.microbatches(rank))
    return [int(i) for m in microbatches if not m.filler for i in m.samples]


def all_ran(plan: BatchPlan, rules: PlanRules) -> list[int]:
    return [i for x in plan.mini_batches for i in ran(x, rules)]


@pytest.mark.parametrize("policy", plans.POLICIES)
def test_every_survivor_runs_exactly_once(policy: str) -> None:
    for mini_batches, lengths, signal, rules in cases():
        plan = plans.POLICIES[policy](mini_batches, lengths, signal, rules)
        found = all_ran(plan, rules)
        assert len(found) == len(set(found)) and set(np.flatnonzero(signal).tolist()) <= set(found)
        assert all((x.kind is StepKind.GHOST) == (len(x.order) == 0) for x in plan.mini_batches)
        assert BatchPlan.from_json(plan.to_json()).fingerprints() == plan.fingerprints()


@pytest.mark.parametrize("policy", ["ours", "keep_one"])
def test_ours_and_keep_one_leave_every_survivor_in_its_own_step(policy: str) -> None:
    for mini_batches, lengths, signal, rules in cases():
        plan = plans.POLICIES[policy](mini_batches, lengths, signal, rules)
        for planned, members in zip(plan.mini_batches, mini_batches, strict=True):
            found = ran(planned, rules)
            assert set(found) <= set(members.tolist()) and set(members[signal[members]].tolist()) <= set(found)
            assert sorted([*found, *planned.dropped.tolist()]) == members.tolist()


def test_keep_one_runs_as_many_microbatches_as_dense() -> None:
    for mini_batches, lengths, signal, rules in cases():
        dense, found = (plans.POLICIES[x](mini_batches, lengths, signal, rules) for x in ("dense", "keep_one"))
        for a, b in zip(dense.mini_batches, found.mini_batches, strict=True):
            assert a.num_microbatches.tolist() == b.num_microbatches.tolist()
            for rank in range(rules.data_size):
                for whole, kept in zip(a.microbatches(rank), b.microbatches(rank), strict=True):
                    live = whole.samples[signal[whole.samples]]
                    if whole.filler:
                        assert kept.filler and len(kept.samples) == 1
                    elif len(live):
                        assert kept.samples.tolist() == live.tolist()
                    else:
                        assert len(kept.samples) == 1 and lengths[kept.samples[0]] == lengths[whole.samples].min()


def test_filter_pad_runs_a_multiple_of_ranks_and_steps_with_its_ghosts_last() -> None:
    gave_up = 0
    for mini_batches, lengths, signal, rules in cases():
        plan = plans.filter_pad(mini_batches, lengths, signal, rules)
        assert len(plan.mini_batches) == len(mini_batches)
        found = [ran(x, rules) for x in plan.mini_batches]
        if sum(map(len, found)) == len(signal):
            gave_up += 1
            assert plan.fingerprints() == plans.dense(mini_batches, lengths, signal, rules).fingerprints()
            continue
        real = [x for x in found if x]
        assert found == real + [[]] * (len(found) - len(real))
        assert len(real) == min(len(mini_batches), max(1, -(-int(signal.sum()) // rules.data_size)))
        assert len({len(x) for x in real}) == 1 and len(real[0]) % rules.data_size == 0
        assert_shortest_padding(sorted(i for x in real for i in x), lengths, signal, rules.data_size * len(real))
    assert 0 < gave_up < len(cases())


def assert_shortest_padding(kept: list[int], lengths: np.ndarray, signal: np.ndarray, multiple: int) -> None:
    """Assert no more padding than the multiple asks for, and no sample left out that is shorter."""
    padding = [i for i in kept if not signal[i]]
    left = np.setdiff1d(np.flatnonzero(~signal), padding)
    assert len(padding) == (-int(signal.sum()) % multiple if signal.any() else multiple)
    assert not padding or not len(left) or lengths[padding].max() <= lengths[left].min()


def test_fewest_steps_are_as_few_as_the_size_allows_and_policies_of_eight_samples_by_hand() -> None:
    for mini_batches, lengths, signal, rules in cases():
        kept = all_ran(plans.filter_pad(mini_batches, lengths, signal, rules), rules)
        plan = plans.fewest_steps(mini_batches, lengths, signal, rules)
        assert len(plan.mini_batches) == -(-len(kept) // len(mini_batches[0]))
        assert all(x.kind is StepKind.REAL for x in plan.mini_batches) and sorted(all_ran(plan, rules)) == sorted(kept)
    # there are two steps of four, signal in 0, 1, 2; 7 is the shortest
    mini_batches, lengths = split_mini_batches(np.arange(8), 4), np.array([5, 6, 7, 8, 9, 9, 9, 3])
    signal = np.isin(np.arange(8), [0, 1, 2])
    found = {name: policy(mini_batches, lengths, signal, PlanRules()) for name, policy in plans.POLICIES.items()}
    wanted = dict(dense=[[0, 1, 2, 3], [4, 5, 6, 7]], ours=[[0, 1, 2], []], keep_one=[[0, 1, 2], [7]])
    wanted |= dict(filter_pad=[[0, 1], [2, 7]], fewest_steps=[[0, 1, 2, 7]])
    assert {name: [x.order.tolist() for x in plan.mini_batches] for name, plan in found.items()} == wanted


def test_weights_are_each_samples_own_or_counted_over_what_the_step_runs() -> None:
    """Two steps, 10 + 30 and 20 + 60 tokens, signal in 0 and 2, become one: weights are 1/40 and 1/80, or 1/30 each."""
    numbers, tokens = np.arange(4), np.array([10, 30, 20, 60])
    counts = dict(prompt_tokens=np.full(4, 2), response_tokens=tokens, loss_tokens=tokens)
    facts = BatchFacts(sample_ids=tuple("abcd"), groups=numbers, owners=numbers * 0, owner_rows=numbers, **counts)
    values, members = np.array([2.0, 0.0, -1.0, 0.0]), split_mini_batches(numbers, 2)
    rollout = run.Rollout(batch=Batch(facts=facts, local=[]), values=values, mini_batches=members)
    plan = rollout.plan("fewest_steps", PlanRules())
    (original,), (renormalised,) = (rollout.inputs(plan, None, renormalised=x) for x in (False, True))
    assert original.weights == pytest.approx([1 / 40, 1 / 40, 1 / 80, 1 / 80])
    assert original.advantages == pytest.approx([2 / 40, 0, -1 / 80, 0])
    assert renormalised.weights == pytest.approx([1 / 30, 0, 1 / 30, 0])
    assert renormalised.advantages == pytest.approx([2 / 30, 0, -1 / 30, 0])


def test_errors_are_distances_over_all_weights() -> None:
    places = ((0.0, 0.0), (3.0, 4.0), (3.0, 4.5))
    start, truth, found = ({"a": torch.tensor([x, 0.0]), "b": torch.tensor([y])} for x, y in places)
    assert run.errors(found, truth, start) == {"error_of_movement": 0.1, "error_of_weights": 0.1}
    assert run.errors(found, truth, truth)["error_of_movement"] is None


def trajectories(rank: int, world: int, pipeline: int) -> dict[str, dict]:
    """Return the errors of every policy after two rollouts of three steps, the first one's second without signal."""
    given = (*sizes(1, pipeline), "optimizer.epsilon=1e-3")
    with open_rig("qwen2_tied", *given, samples=24, total_steps=6, layers=2) as rig:
        backend, rules = rig.backend, rig.backend.rules
        backend.keep_reference()
        values = ragged_advantages(24)
        values[8:16] = 0.0
        members = split_mini_batches(np.arange(24), 8)
        rollouts = [run.Rollout(batch=rig.batch, values=x, mini_batches=members) for x in (values, values[::-1].copy())]
        start = run.exported(backend)
        settings = {name: (name, rules, False) for name in plans.POLICIES}
        settings["dense, other cut"] = ("dense", run.with_cap(rules, 80), False)
        settings["fewest_steps, renormalised"] = ("fewest_steps", rules, True)
        ends = {name: run.train(backend, rollouts, policy, cut, lr=1e-3, weight_decay=0.1, renormalised=renormalised)
                for name, (policy, cut, renormalised) in settings.items()}
        assert run.distance(run.exported(backend), start) == 0.0
        return {name: run.errors(end, ends["dense"], start) for name, end in ends.items()}


@pytest.mark.parametrize("pipeline", quick([1, 2], 2))
def test_ours_ends_where_dense_ends_and_fewer_steps_do_not(pool: Pool, pipeline: int) -> None:
    """The bound is 1e-5 of the movement: float32 sums in another order, through AdamW, whose epsilon is raised so that
    a gradient of rounding alone (an attention bias) makes no whole step. Policies that move samples are far off.
    """
    for found in pool.run(2, trajectories, pipeline, timeout_s=90):
        error = {name: x["error_of_movement"] for name, x in found.items()}
        assert error["dense"] == 0.0
        assert max(error["ours"], error["keep_one"], error["dense, other cut"]) < 1e-5, error
        assert min(error["filter_pad"], error["fewest_steps"], error["fewest_steps, renormalised"]) > 1e-2, error


def measured(rank: int, world: int) -> str:
    """Return one dead share as the tool measures it, as JSON."""
    sizes_of = "--groups 8 --group-size 2 --mean-tokens 12 --mini-batches 2 --rollouts 2 --repeats 1 --lr 1e-3"
    given = tool.parse(words(f"{sizes_of} --max-tokens-per-microbatch 16 32 64"))
    with open_rig("qwen2_tied", "optimizer.epsilon=1e-3", layers=2) as rig:
        rig.backend.keep_reference()
        return json.dumps(tool.measure(rig.backend, given, 0.5))


@pytest.mark.long(seconds=10)
def test_every_setting_is_measured_and_the_fastest_shown(pool: Pool) -> None:
    (found,) = (json.loads(x) for x in pool.run(1, measured, timeout_s=90))
    assert [row["name"] for row in found["rows"]] == [name for name, _, _ in tool.VARIANTS]
    rows = {row["name"]: row for row in found["rows"]}
    for policy in plans.POLICIES:
        settings = found["settings"][policy]
        assert [x["max_tokens"] for x in settings] == [16, 32, 64]
        assert rows[policy]["seconds"] == min(x["seconds"] for x in settings) and rows[policy]["predicted_s"] > 0
        assert found["trajectory"][policy]["real_steps"] + found["trajectory"][policy]["ghost_steps"] <= 4
    assert rows["dense, other cut"]["max_tokens"] != rows["dense"]["max_tokens"]
    assert rows["dense"]["error_of_movement"] == 0.0
    # another order of float32 sums, and no more: see above
    assert max(rows[name]["error_of_movement"] for name in ("ours", "keep_one", "dense, other cut")) < 1e-5
    assert rows["fewest_steps"]["real_steps"] == 1 and rows["fewest_steps"]["error_of_movement"] > 1e-2

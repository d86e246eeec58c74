"""planning/plan.py: every invariant under Hypothesis, fingerprints, ghosts, and the number of micro-batches."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import ConfigError
from megatron_rl.planning.plan import (
    PlanRules,
    plan_steps,
    split_mini_batches,
)
from megatron_rl.planning.spread import SampleCosts, balance
from megatron_rl.planning.tokens import SampleTokens, padded_lengths
from megatron_rl.types import BatchPlan, StepKind, StepPlan
from tests.unit.planning.lockstep import assert_lockstep, microbatches_of
from tests.unit.planning.pipeline_cost import pipeline

SETTINGS = settings(max_examples=120, deadline=None, derandomize=True, database=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The arguments of one call of ``plan_steps``.

    prompt: [S], tokens of ``lengths`` that each sample's group shares.
    """

    mini_batches: list[np.ndarray]
    lengths: np.ndarray
    prompt: np.ndarray
    group: np.ndarray
    signal: np.ndarray
    rules: PlanRules
    drops: bool
    merge: bool

    @property
    def tokens(self) -> SampleTokens:
        return SampleTokens(own=self.lengths - self.prompt, prompt=self.prompt, group=self.group)

    @property
    def padded(self) -> SampleTokens:
        return self.tokens.padded(self.rules.pad_multiple)

    def plan(self, **changed) -> BatchPlan:
        case = dataclasses.replace(self, **changed)
        return plan_steps(
            "train", case.mini_batches, case.tokens, case.signal, case.rules, drops=case.drops, merge=case.merge
        )


@st.composite
def cases(draw, *, repack: bool | None = None, static: bool | None = None) -> Case:
    """Draw rules by Hypothesis, lengths and signal by a seed.

    Most cases would be near copies of a few otherwise.
    """
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(0, 40))
    lengths = random.integers(1, draw(st.sampled_from([2, 70])), count)
    group = np.sort(random.integers(0, max(1, count // draw(st.sampled_from([1, 3, 8]))), count))
    prompt = np.zeros(count, dtype=np.int64)
    if draw(st.booleans()):  # prompts are shared
        prompt = random.integers(1, draw(st.sampled_from([2, 90])), count)[group]
        lengths = lengths + prompt
    signal = random.random(count) < draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    if count and draw(st.integers(0, 5)) == 0:
        signal = np.arange(count) == random.integers(count)  # one survivor
    sizes = st.sampled_from([1, 3] if static else [None] if static is False else [None, 1, 3])
    data_size = draw(st.integers(1, 8))
    max_tokens = draw(st.sampled_from([1, 33, 64, 257, 8192]))
    rules = PlanRules(
        data_size=data_size,
        lockstep_ranks=draw(st.sampled_from([d for d in range(1, 9) if data_size % d == 0])),
        samples_per_microbatch=draw(sizes),
        max_tokens=max_tokens,
        pad_multiple=draw(st.sampled_from([1, 2, 8])),
        row_multiple=draw(st.sampled_from([1, 16, 64] if max_tokens % 64 == 0 else [1])),
        cost=pipeline(
            draw(st.integers(1, 8)),
            overhead=draw(st.sampled_from([0.0, 1.0, 20.0, 256.0])),
            square=draw(st.sampled_from([0.0, 0.02])),
            last=draw(st.sampled_from([1.0, 1.7])),
        ),
        repack=draw(st.booleans()) if repack is None else repack,
        microbatch_multiple=draw(st.sampled_from([1, 1, 2, 4])),
    )
    samples = random.permutation(count) if draw(st.booleans()) else np.arange(count)
    return Case(
        mini_batches=split_mini_batches(samples, draw(st.sampled_from([None, 1, 4, 7, 16]))),
        lengths=lengths,
        prompt=prompt,
        group=group,
        signal=signal,
        rules=rules,
        drops=draw(st.sampled_from([True, True, False])),
        merge=draw(st.booleans()),
    )


def assert_invariants(plan: BatchPlan, case: Case) -> None:
    """Assert every numbered invariant of planning/plan.py on one plan."""
    mini_batches, rules = case.mini_batches, case.rules
    if case.merge and mini_batches:
        mini_batches = [np.concatenate(mini_batches)]
    assert len(plan.mini_batches) == len(mini_batches)
    dense = case.plan(drops=False)
    padded, costs = case.padded, SampleCosts.of(case.padded, rules.cost)
    for planned, members, dense_one in zip(plan.mini_batches, mini_batches, dense.mini_batches, strict=True):
        per_rank = microbatches_of(planned, rules.data_size)
        flat = [m for rank in per_rank for m in rank]
        ran = [i for m in flat for i in m]
        assert planned.members.tolist() == members.tolist()
        assert sorted(ran + planned.dropped.tolist()) == sorted(members.tolist())  # 1
        assert not case.signal[planned.dropped].any() and (case.drops or len(planned.dropped) == 0)  # 2
        if case.drops and rules.repack:
            assert case.signal[ran].all()  # 3
        for m in flat:  # 4
            if rules.samples_per_microbatch is not None:
                assert len(m) <= rules.samples_per_microbatch
            else:
                tokens = naive_tokens(padded, m)
                assert len(m) == 1 or -(-tokens // rules.row_multiple) * rules.row_multiple <= rules.max_tokens
        assert all(flat) and (planned.kind is StepKind.GHOST) == (not ran)  # 5
        dense_per_rank = microbatches_of(dense_one, rules.data_size)
        if not rules.repack:  # 7
            live = [[m for m in rank if case.signal[m].any()] for rank in dense_per_rank]
            assert per_rank == (live if case.drops else dense_per_rank)
        if rules.samples_per_microbatch is None and (rules.repack or len(ran) == len(members)):  # 8
            shares = [np.array([i for m in rank for i in m], dtype=np.int64) for rank in per_rank]
            loads = [costs.total(share) for share in shares]
            each = costs.alone()
            if padded.shares:
                plain = balance(np.sort(np.concatenate(shares)), each, rules.data_size)
                assert max(loads) <= max(map(costs.total, plain)) / 0.99 * (1 + 1e-9)
            else:
                assert max(loads) - min(loads) <= max((float(each[i]) for i in ran), default=0.0) * (1 + 1e-9)
        if rules.samples_per_microbatch is None and len(rules.cost.stages) > 1:
            assert_costliest_in_the_middle(planned, costs)  # 12
        assert planned.microbatches_dropped == dense_one.num_microbatches.sum() - planned.num_microbatches.sum()
        assert_lockstep(planned, rules, padded.whole)
    assert_fingerprint_invariant(plan, case)  # 6
    assert_long_samples_fail_alike(case)  # 11


def naive_tokens(tokens: SampleTokens, samples: list[int]) -> int:
    """Return the tokens of a micro-batch, each group's prompt counted once."""
    prompts = {int(tokens.group[i]): int(tokens.prompt[i]) for i in samples}
    return sum(int(tokens.own[i]) for i in samples) + sum(prompts.values())


def assert_costliest_in_the_middle(planned: StepPlan, costs: SampleCosts) -> None:
    samples = np.split(planned.order, planned.microbatch_offsets[1:-1])
    for a, b in zip(planned.rank_offsets[:-1], planned.rank_offsets[1:], strict=True):
        run = np.array([costs.total(samples[m]) for m in range(a, b) if not planned.filler_microbatches[m]])
        top = int(run.argmax()) if len(run) else 0
        slack = 1e-9 * run.max(initial=0.0)
        assert (np.diff(run[: top + 1]) >= -slack).all() and (np.diff(run[top:]) <= slack).all()


def assert_fingerprint_invariant(plan: BatchPlan, case: Case) -> None:
    """Assert that equal inputs give equal fingerprints, which members alone decide.

    A sample that is no member changes nothing, whatever its length and its signal.
    """
    again = case.plan(
        lengths=case.lengths.copy(), signal=case.signal.copy(), mini_batches=[x.copy() for x in case.mini_batches]
    )
    assert plan.fingerprints() == again.fingerprints()
    more = case.plan(
        lengths=np.append(case.lengths, 999),
        prompt=np.append(case.prompt, 0),
        group=np.append(case.group, -1),
        signal=np.append(case.signal, True),
    )
    assert plan.fingerprints() == more.fingerprints()
    copy = BatchPlan.from_json(json.dumps(json.loads(plan.to_json())))
    assert plan.fingerprints() == copy.fingerprints() and copy.to_json() == plan.to_json()


def assert_long_samples_fail_alike(case: Case) -> None:
    """Assert that on_long_sample=fail is an error iff a member is above the cap, whatever is dropped.

    Else the plan is that of ``own_microbatch``; a static cut has no cap.
    """
    failing = dataclasses.replace(case.rules, on_long_sample="fail")
    above = case.padded.whole > failing.max_tokens
    for drops in (False, True):
        if failing.samples_per_microbatch is None and above.any():
            with pytest.raises(ConfigError, match="on_long_sample=fail"):
                case.plan(rules=failing, drops=drops)
        else:
            assert case.plan(rules=failing, drops=drops).fingerprints() == case.plan(drops=drops).fingerprints()


@pytest.mark.parametrize("repack", [True, False])
@pytest.mark.parametrize("static", [True, False])
@SETTINGS
@given(data=st.data())
def test_invariants(repack: bool, static: bool, data: st.DataObject) -> None:
    case = data.draw(cases(repack=repack, static=static))
    assert_invariants(case.plan(), case)


@SETTINGS
@given(case=cases())
def test_signal_everywhere_equals_no_drop(case: Case) -> None:
    everywhere = np.ones_like(case.signal)
    assert case.plan(signal=everywhere).to_json() == case.plan(drops=False).to_json()


@SETTINGS
@given(case=cases())
def test_merge_gives_one_step(case: Case) -> None:
    """Merging gives one mini-batch of all members, REAL iff any of them has signal."""
    plan = case.plan(merge=True, drops=True)
    assert len(plan.mini_batches) == min(1, len(case.mini_batches))
    for merged in plan.mini_batches:
        assert merged.members.tolist() == [i for x in case.mini_batches for i in x.tolist()]
        assert (merged.kind is StepKind.REAL) == bool(case.signal.any())


def test_ghost_stands_at_its_own_position() -> None:
    """A ghost stands at its own position among the mini-batches.

    Of three mini-batches of two, the first and the last have signal: the ghost is the second, and the optimizer steps
    three times.
    """
    signal = np.array([False, True, False, False, True, True])
    plan = plan_steps(
        "train", split_mini_batches(np.arange(6), 2), np.full(6, 5), signal, PlanRules(data_size=2), drops=True
    )
    assert [x.kind for x in plan.mini_batches] == [StepKind.REAL, StepKind.GHOST, StepKind.REAL]
    assert [x.order.tolist() for x in plan.mini_batches] == [[1], [], [4, 5]]
    assert [x.members.tolist() for x in plan.mini_batches] == [[0, 1], [2, 3], [4, 5]]
    assert [x.silent_ranks for x in plan.mini_batches] == [1, 0, 0]


@pytest.mark.parametrize(
    ("size", "wanted"),
    [(None, [[0, 1, 2, 3, 4]]), (2, [[0, 1], [2, 3], [4]]), (5, [[0, 1, 2, 3, 4]]), (9, [[0, 1, 2, 3, 4]])],
)
def test_split_mini_batches_leaves_the_rest_in_the_last(size: int | None, wanted: list[list[int]]) -> None:
    assert [x.tolist() for x in split_mini_batches(np.arange(5), size)] == wanted
    assert split_mini_batches(np.arange(0), size) == []


def test_pads_count_against_the_cap() -> None:
    """Pads count against the cap.

    Four sequences of 9 tokens are 36, under a cap of 40; padded to 16 they are 64 and need two micro-batches.
    """
    lengths, members = np.full(4, 9), [np.arange(4)]
    for multiple, microbatches in ((1, 1), (16, 2)):
        plan = plan_steps(
            "train",
            members,
            lengths,
            np.ones(4, dtype=bool),
            PlanRules(max_tokens=40, pad_multiple=multiple),
            drops=True,
        )
        assert len(plan.mini_batches[0].filler_microbatches) == microbatches


def test_no_microbatch_exceeds_the_token_cap() -> None:
    """No micro-batch exceeds the token cap, not by one token.

    Longest first lays 9, 7, 4 and 4 tokens out as 13 and 11: two micro-batches under a cap of 13, three under 12.
    """
    lengths = np.array([9, 7, 4, 4])
    for cap, microbatches in ((11, 3), (12, 3), (13, 2), (14, 2)):
        (one,) = plan_steps(
            "train", [np.arange(4)], lengths, np.ones(4, dtype=bool), PlanRules(max_tokens=cap), drops=True
        ).mini_batches
        tokens = [sum(lengths[i] for i in m) for rank in microbatches_of(one, 1) for m in rank]
        assert len(tokens) == microbatches and max(tokens) <= cap, (cap, tokens)


def test_padded_lengths_equal_a_loop() -> None:
    for multiple in (1, 2, 8):
        wanted = [next(padded for padded in range(n, n + multiple) if padded % multiple == 0) for n in range(40)]
        assert padded_lengths(np.arange(40), multiple).tolist() == wanted


def test_fingerprint_sees_every_field() -> None:
    """The fingerprint sees every field in which ranks must agree.

    A rank that differs in membership, drop, cut, order, ranks, fillers, kind or purpose must not go on.
    """
    lengths = np.arange(1, 9)
    signal = np.array([True, True, False, True, True, True, True, False])
    base = plan_steps("train", [np.arange(8)], lengths, signal, PlanRules(data_size=2, max_tokens=12), drops=True)
    (one,) = base.mini_batches
    swapped = one.order.copy()
    swapped[[0, -1]] = swapped[[-1, 0]]
    ranks, bounds = one.rank_offsets.copy(), one.microbatch_offsets.copy()
    ranks[1] += 1
    bounds[1] += 1
    fillers = one.filler_microbatches.copy()
    fillers[0] = True
    changes = {
        "members": one.members[:-1],
        "dropped": one.dropped[:-1],
        "order": swapped,
        "rank_offsets": ranks,
        "microbatch_offsets": bounds,
        "filler_microbatches": fillers,
        "kind": StepKind.GHOST,
    }
    seen = {base.fingerprints()[0], dataclasses.replace(base, purpose="logprob").fingerprints()[0]}
    for name, value in changes.items():
        changed = dataclasses.replace(base, mini_batches=(dataclasses.replace(one, **{name: value}),))
        seen.add(changed.fingerprints()[0])
    assert len(seen) == 2 + len(changes)
    # a count for metrics only
    assert {f.name for f in dataclasses.fields(StepPlan)} - set(changes) == {"microbatches_dropped"}


def test_fingerprint_sees_a_length_that_moves_a_sample() -> None:
    lengths, members = np.array([9, 1, 1, 1]), [np.arange(4)]
    plans = [
        plan_steps("train", members, x, np.ones(4, dtype=bool), PlanRules(data_size=2), drops=True)
        for x in (lengths, lengths[::-1])
    ]
    assert plans[0].fingerprints() != plans[1].fingerprints()


def test_json_carries_details() -> None:
    plan = dataclasses.replace(
        plan_steps("train", [], np.arange(0), np.ones(0, dtype=bool), PlanRules(), drops=True), details={"step": 3}
    )
    assert BatchPlan.from_json(plan.to_json()).details == {"step": 3} and plan.fingerprints() == ()


def test_a_plan_is_held_only_where_it_runs_nothing() -> None:
    """A held plan is another plan to the ranks that compare it."""
    nothing, everything = np.zeros(4, dtype=bool), np.ones(4, dtype=bool)
    halves, lengths = [np.arange(2), np.arange(2, 4)], np.full(4, 3)
    ghosts, real = (plan_steps("train", halves, lengths, x, PlanRules(), drops=True) for x in (nothing, everything))
    assert [step.kind for step in ghosts.held().mini_batches] == [StepKind.HELD] * 2
    assert not set(ghosts.held().fingerprints()) & set(ghosts.fingerprints())
    with pytest.raises(ValueError, match="cannot be held"):
        real.held()


@pytest.mark.parametrize("data_size", [1, 64])
def test_100_000_samples_plan(data_size: int) -> None:
    """100,000 samples are planned without a walk over all samples for each micro-batch.

    One rank with tens of thousands of micro-batches plans too.
    """
    random = np.random.default_rng(0)
    lengths = random.integers(50, 4000, 100_000)
    signal = random.random(100_000) < 0.4
    rules = PlanRules(data_size=data_size, cost=pipeline(8), max_tokens=8192)
    (one,) = plan_steps("train", [np.arange(100_000)], lengths, signal, rules, drops=True).mini_batches
    assert np.array_equal(np.sort(one.order), np.flatnonzero(signal))
    tokens = np.add.reduceat(lengths[one.order], one.microbatch_offsets[:-1])
    assert tokens.max() <= rules.max_tokens
    loads = [int(lengths[one.rank_samples(rank)].sum()) for rank in range(data_size)]
    assert max(loads) - min(loads) <= lengths.max()


def test_long_sample_error_names_the_sample_and_the_way_out() -> None:
    rules = PlanRules(max_tokens=16, pad_multiple=8, on_long_sample="fail")
    wanted = (
        "sample index 2 of the batch has 24 tokens, pads included, more than "
        "plan.max_tokens_per_microbatch=16.*own_microbatch"
    )
    with pytest.raises(ConfigError, match=wanted):
        plan_steps("train", [np.arange(3)], np.array([3, 16, 17]), np.array([True, False, False]), rules, drops=True)
    with pytest.raises(ConfigError, match="sample 7@0#1 has 24 tokens"):
        plan_steps(
            "train",
            [np.array([0, 1])],
            np.array([3, 17]),
            np.ones(2, dtype=bool),
            rules,
            drops=True,
            sample_ids=("7@0#0", "7@0#1"),
        )
    # sample 2 is no member
    plan_steps("logprob", [np.array([0, 1])], np.array([3, 16, 17]), np.ones(3, dtype=bool), rules, drops=True)

"""planning/plan.py: every invariant under Hypothesis, fingerprints, ghosts, and the number of micro-batches."""

import dataclasses
import json
from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import ConfigError
from megatron_rl.planning.plan import PlanRules, plan_steps, split_mini_batches
from megatron_rl.planning.spread import SampleCosts, balance
from megatron_rl.planning.tokens import SampleTokens, padded_lengths
from megatron_rl.types import BatchPlan, StepKind, StepPlan
from tests.pairwise import quick
from tests.unit.planning.lockstep import assert_lockstep, microbatches_of, one_step, pipeline

SETTINGS = settings(max_examples=45, deadline=None, derandomize=True, database=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The arguments of one call of ``plan_steps``; prompt: [S], tokens of ``lengths`` that a sample's group shares."""

    mini_batches: list[np.ndarray]
    lengths: np.ndarray
    prompt: np.ndarray
    group: np.ndarray
    signal: np.ndarray
    rules: PlanRules
    drops: bool

    @property
    def tokens(self) -> SampleTokens:
        return SampleTokens(own=self.lengths - self.prompt, prompt=self.prompt, group=self.group)

    @property
    def padded(self) -> SampleTokens:
        return self.tokens.padded(self.rules.pad_multiple)

    def plan(self, **changed) -> BatchPlan:
        case = dataclasses.replace(self, **changed)
        return plan_steps("train", case.mini_batches, case.tokens, case.signal, case.rules, drops=case.drops)


@st.composite
def cases(draw, *, repack: bool | None = None, static: bool | None = None) -> Case:
    """Draw rules by Hypothesis, lengths and signal by a seed. Most cases would be near copies of a few otherwise."""
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
    data_size, max_tokens = draw(st.integers(1, 8)), draw(st.sampled_from([1, 33, 64, 257, 8192]))
    rules = PlanRules(data_size=data_size,
                      lockstep_ranks=draw(st.sampled_from([d for d in range(1, 9) if data_size % d == 0])),
                      samples_per_microbatch=draw(sizes),
                      max_tokens=max_tokens,
                      pad_multiple=draw(st.sampled_from([1, 2, 8])),
                      row_multiple=draw(st.sampled_from([1, 16, 64] if max_tokens % 64 == 0 else [1])),
                      cost=pipeline(draw(st.integers(1, 8)), overhead=draw(st.sampled_from([0.0, 1.0, 20.0, 256.0])),
                                    square=draw(st.sampled_from([0.0, 0.02])), last=draw(st.sampled_from([1.0, 1.7]))),
                      repack=draw(st.booleans()) if repack is None else repack,
                      microbatch_multiple=draw(st.sampled_from([1, 1, 2, 4])))
    samples = random.permutation(count) if draw(st.booleans()) else np.arange(count)
    return Case(mini_batches=split_mini_batches(samples, draw(st.sampled_from([None, 1, 4, 7, 16]))), lengths=lengths,
                prompt=prompt, group=group, signal=signal, rules=rules,
                drops=draw(st.sampled_from([True, True, False])))


def assert_invariants(plan: BatchPlan, case: Case) -> None:
    """Assert every numbered invariant of planning/plan.py on one plan."""
    mini_batches, rules = case.mini_batches, case.rules
    assert len(plan.mini_batches) == len(mini_batches)
    dense = case.plan(drops=False)
    assert case.plan(signal=np.ones_like(case.signal)).to_json() == dense.to_json()  # signal everywhere: no drop
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
            live = [[] for _ in dense_per_rank]
            for first in range(0, rules.data_size, rules.lockstep_ranks):
                block = range(first, first + rules.lockstep_ranks)
                for row in zip_longest(*(dense_per_rank[rank] for rank in block)):
                    if any(case.signal[m].any() for m in row if m is not None):
                        for rank, m in zip(block, row, strict=True):
                            live[rank] += [] if m is None else [m]
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
    """Assert equal fingerprints for equal inputs: a sample that is no member changes nothing."""
    arrays = {name: getattr(case, name) for name in ("lengths", "signal", "prompt", "group")}
    again = case.plan(**{k: x.copy() for k, x in arrays.items()}, mini_batches=[x.copy() for x in case.mini_batches])
    further = dict(lengths=999, signal=True, prompt=0, group=-1)
    more = case.plan(**{name: np.append(x, further[name]) for name, x in arrays.items()})
    assert plan.fingerprints() == again.fingerprints() == more.fingerprints()
    copy = BatchPlan.from_json(json.dumps(json.loads(plan.to_json())))
    assert plan.fingerprints() == copy.fingerprints() and copy.to_json() == plan.to_json()


def assert_long_samples_fail_alike(case: Case) -> None:
    """Assert that on_long_sample=fail is an error iff a member is above the cap, whatever is dropped."""
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


@pytest.mark.parametrize(
    ("size", "wanted"),
    [(None, [[0, 1, 2, 3, 4]]), (2, [[0, 1], [2, 3], [4]]), (5, [[0, 1, 2, 3, 4]]), (9, [[0, 1, 2, 3, 4]])],
)
def test_split_mini_batches_leaves_the_rest_in_the_last(size: int | None, wanted: list[list[int]]) -> None:
    assert [x.tolist() for x in split_mini_batches(np.arange(5), size)] == wanted
    assert split_mini_batches(np.arange(0), size) == [] == split_mini_batches(np.arange(0), size, merge=True)
    assert [x.tolist() for x in split_mini_batches(np.arange(5), size, merge=True)] == [[0, 1, 2, 3, 4]]


def test_pads_count_against_the_cap() -> None:
    """Four sequences of 9 tokens are 36, under a cap of 40; padded to 16 they are 64 and need two micro-batches."""
    for multiple, microbatches in ((1, 1), (16, 2)):
        one = one_step([9] * 4, PlanRules(max_tokens=40, pad_multiple=multiple))
        assert len(one.filler_microbatches) == microbatches


def test_no_microbatch_exceeds_the_token_cap() -> None:
    """Longest first lays 9, 7, 4 and 4 tokens out as 13 and 11: two micro-batches under a cap of 13, three under 12."""
    lengths = [9, 7, 4, 4]
    for cap, microbatches in ((11, 3), (12, 3), (13, 2), (14, 2)):
        (rank,) = microbatches_of(one_step(lengths, PlanRules(max_tokens=cap)), 1)
        tokens = [sum(lengths[i] for i in m) for m in rank]
        assert len(tokens) == microbatches and max(tokens) <= cap, (cap, tokens)


def test_padded_lengths_equal_a_loop() -> None:
    for multiple in (1, 2, 8):
        wanted = [next(padded for padded in range(n, n + multiple) if padded % multiple == 0) for n in range(40)]
        assert padded_lengths(np.arange(40), multiple).tolist() == wanted


def test_fingerprint_sees_every_field() -> None:
    """A rank that differs in membership, drop, cut, order, ranks, fillers, kind or purpose must not go on."""
    signal = np.array([True, True, False, True, True, True, True, False])
    rules = PlanRules(data_size=2, max_tokens=12)
    base = plan_steps("train", [np.arange(8)], np.arange(1, 9), signal, rules, drops=True)
    (one,) = base.mini_batches
    changes = {"members": one.members[:-1],
               "dropped": one.dropped[:-1],
               "order": one.order[::-1],
               "rank_offsets": one.rank_offsets + [0, 1, 0],
               "microbatch_offsets": one.microbatch_offsets + (np.arange(len(one.microbatch_offsets)) == 1),
               "filler_microbatches": np.append(True, one.filler_microbatches[1:]),
               "kind": StepKind.GHOST}
    seen = {base.fingerprints()[0], dataclasses.replace(base, purpose="logprob").fingerprints()[0]}
    for name, value in changes.items():
        changed = dataclasses.replace(base, mini_batches=(dataclasses.replace(one, **{name: value}),))
        seen.add(changed.fingerprints()[0])
    assert len(seen) == 2 + len(changes)
    # a count for metrics only
    assert {f.name for f in dataclasses.fields(StepPlan)} - set(changes) == {"microbatches_dropped"}


def test_a_plan_is_held_only_where_it_runs_nothing_and_json_carries_details() -> None:
    """A held plan is another plan to the ranks that compare it."""
    nothing, everything = np.zeros(4, dtype=bool), np.ones(4, dtype=bool)
    halves, lengths = [np.arange(2), np.arange(2, 4)], np.full(4, 3)
    ghosts, real = (plan_steps("train", halves, lengths, x, PlanRules(), drops=True) for x in (nothing, everything))
    assert [step.kind for step in ghosts.held().mini_batches] == [StepKind.HELD] * 2
    assert not set(ghosts.held().fingerprints()) & set(ghosts.fingerprints())
    with pytest.raises(ValueError, match="cannot be held"):
        real.held()
    nobody = plan_steps("train", [], np.arange(0), np.ones(0, dtype=bool), PlanRules(), drops=True)
    told = BatchPlan.from_json(dataclasses.replace(nobody, details={"step": 3}).to_json())
    assert told.details == {"step": 3} and told.fingerprints() == ()


@pytest.mark.parametrize("data_size", quick([1, 64], 1))
def test_100_000_samples_plan(data_size: int) -> None:
    """No walk over all samples for each micro-batch: one rank with tens of thousands of them plans too."""
    random = np.random.default_rng(0)
    lengths = random.integers(50, 4000, 100_000)
    signal = random.random(100_000) < 0.4
    rules = PlanRules(data_size=data_size, cost=pipeline(8), max_tokens=8192)
    one = one_step(lengths, rules, signal=signal)
    assert np.array_equal(np.sort(one.order), np.flatnonzero(signal))
    tokens = np.add.reduceat(lengths[one.order], one.microbatch_offsets[:-1])
    assert tokens.max() <= rules.max_tokens
    loads = [int(lengths[one.rank_samples(rank)].sum()) for rank in range(data_size)]
    assert max(loads) - min(loads) <= lengths.max()


def test_long_sample_error_names_the_sample_and_the_way_out() -> None:
    rules = PlanRules(max_tokens=16, pad_multiple=8, on_long_sample="fail")
    wanted = "sample index 2 of the batch has 24 tokens, .* plan.max_tokens_per_microbatch=16.*own_microbatch"
    with pytest.raises(ConfigError, match=wanted):
        one_step([3, 16, 17], rules, signal=[True, False, False])
    named, given = (dict(drops=True, sample_ids=("7@0#0", "7@0#1", "7@0#2")),
                    (np.array([3, 16, 17]), np.ones(3, dtype=bool)))
    with pytest.raises(ConfigError, match="sample 7@0#2 has 24 tokens"):
        plan_steps("train", [np.array([0, 2])], *given, rules, **named)
    plan_steps("logprob", [np.array([0, 1])], *given, rules, **named)  # sample 2 is no member

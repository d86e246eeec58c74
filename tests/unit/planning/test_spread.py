"""Checks planning/spread.py: bins of near-equal cost, whole groups where cutting them gains nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.planning.cost import CostModel, StageCost
from megatron_rl.planning.spread import SampleCosts, balance, split_to, spread
from megatron_rl.planning.tokens import SampleTokens

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True, database=None)
MODEL = CostModel(stages=(StageCost(overhead=9.0, token=1.0, square=0.01),))
LINEAR = CostModel(stages=(StageCost(overhead=0.0, token=1.0, square=0.0),))


@st.composite
def tokens(draw) -> SampleTokens:
    """Draw up to 30 samples in groups with one prompt each; some may have no token of their own."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(1, 30))
    group = random.integers(0, draw(st.sampled_from([1, 3, 30])), count)
    prompt = random.integers(1, draw(st.sampled_from([2, 200])), 30)[group]
    own = random.integers(draw(st.sampled_from([0, 1])), draw(st.sampled_from([2, 60])), count)
    return SampleTokens(own=own, prompt=prompt, group=group)


def naive_cost(sample_tokens: SampleTokens, samples: np.ndarray) -> float:
    """Return the cost of samples in one bin by a loop: own tokens, and each group's prompt once."""
    total, seen = 0.0, set()
    for i in samples.tolist():
        own, prompt = int(sample_tokens.own[i]), int(sample_tokens.prompt[i])
        total += own + 0.01 * (own * own + 2 * own * prompt)
        if int(sample_tokens.group[i]) not in seen:
            seen.add(int(sample_tokens.group[i]))
            total += prompt + 0.01 * prompt * prompt
    return total


@SETTINGS
@given(lengths=st.lists(st.integers(0, 70) | st.integers(0, 2), max_size=40), bins=st.integers(1, 9))
def test_balance_equals_greedy_longest_first(lengths: list[int], bins: int) -> None:
    """Each to the least loaded bin; the first of equal samples, and of equal bins the one of the fewest samples."""
    wanted: list[list[int]] = [[] for _ in range(bins)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        loads = [(sum(lengths[j] for j in x), len(x)) for x in wanted]
        wanted[loads.index(min(loads))].append(i)
    found = balance(np.arange(len(lengths)), np.array(lengths, dtype=np.int64), bins)
    assert [x.tolist() for x in found] == [sorted(x) for x in wanted]


@SETTINGS
@given(sample_tokens=tokens(), bins=st.integers(1, 9))
def test_the_cost_of_a_bin_counts_a_prompt_once(sample_tokens: SampleTokens, bins: int) -> None:
    costs = SampleCosts.of(sample_tokens, MODEL)
    for samples in np.array_split(np.arange(len(sample_tokens.own)), bins):
        count, squares = sample_tokens.total(samples)
        for found in (costs.total(samples), count + 0.01 * squares):
            assert found == pytest.approx(naive_cost(sample_tokens, samples), rel=1e-12)


@SETTINGS
@given(sample_tokens=tokens(), bins=st.integers(1, 9), cap=st.sampled_from([np.inf, 40, 200]))
def test_spread_puts_each_sample_in_one_bin_and_costs_no_more_than_without_sharing(sample_tokens: SampleTokens,
                                                                                   bins: int, cap: float) -> None:
    costs, samples = SampleCosts.of(sample_tokens, MODEL), np.arange(len(sample_tokens.own))
    found = spread(samples, costs, bins, cap)
    assert sorted(np.concatenate(found).tolist()) == samples.tolist() and len(found) == bins
    assert all((np.diff(x) > 0).all() for x in found)
    plain = balance(samples, costs.alone(), bins)
    assert max(map(costs.total, found)) <= max(map(costs.total, plain)) / 0.99 * (1 + 1e-9)


@SETTINGS
@given(sample_tokens=tokens(), bins=st.integers(1, 6), count=st.integers(1, 40))
def test_split_gives_as_many_bins_as_there_are_samples_for(sample_tokens: SampleTokens, bins: int, count: int) -> None:
    costs, samples = SampleCosts.of(sample_tokens, MODEL), np.arange(len(sample_tokens.own))
    found = split_to(spread(samples, costs, bins), count, costs)
    assert sorted(np.concatenate(found).tolist()) == samples.tolist() and all(map(len, found))
    assert len(found) >= min(count, len(samples))


def test_equal_groups_stay_whole() -> None:
    """Eight groups of four on four bins: two whole groups each, no prompt twice."""
    group = np.repeat(np.arange(8), 4)
    sample_tokens = SampleTokens(own=np.full(32, 10), prompt=np.full(32, 50), group=group)
    found = spread(np.arange(32), SampleCosts.of(sample_tokens, MODEL), 4)
    assert [len(set(group[x].tolist())) for x in found] == [2, 2, 2, 2] and [len(x) for x in found] == [8] * 4


@pytest.mark.parametrize(("own", "prompt", "sizes"), [(100, 10, [8, 8]), (1, 1000, [16, 0])])
def test_a_group_is_cut_where_its_answers_outweigh_a_second_prompt(own: int, prompt: int, sizes: list[int]) -> None:
    """Sixteen long answers to a short prompt take both bins, sixteen short ones to a long prompt stay in one."""
    sample_tokens = SampleTokens(own=np.full(16, own), prompt=np.full(16, prompt), group=np.zeros(16, dtype=np.int64))
    assert sorted(map(len, spread(np.arange(16), SampleCosts.of(sample_tokens, LINEAR), 2)), reverse=True) == sizes


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_each_micro_batch_of_a_plan_counts_its_prompts_once(parts: int) -> None:
    """Tokens and squares of micro-batches, over which groups are strewn, equal a loop over each of them alone."""
    random = np.random.default_rng(parts)
    group = random.integers(0, 4, 20)
    sample_tokens = SampleTokens(own=random.integers(0, 60, 20), prompt=random.integers(1, 200, 4)[group], group=group)
    order = random.permutation(20)
    microbatches = np.array_split(order, parts)
    counts, squares = sample_tokens.sums(order, np.cumsum([0, *map(len, microbatches)]))
    wanted = [naive_cost(sample_tokens, samples) for samples in microbatches]
    assert (counts + 0.01 * squares).tolist() == pytest.approx(wanted, rel=1e-12)

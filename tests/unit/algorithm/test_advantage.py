"""algorithm/advantage.py: every invariant under Hypothesis, and every estimator and reduction.

Each estimator and each reduction is compared with a loop over its formula.
"""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm.advantage import GroupRewards, advantages, may_have_advantage, reduction_weights
from megatron_rl.algorithm.estimators import Rewards, batch_std, dr_grpo, gdpo, grpo, reinforce_plus_plus, rloo
from megatron_rl.config import GROUP_ESTIMATORS, REDUCTIONS
from megatron_rl.types import BatchFacts
from tests.unit.algorithm.facts import make_facts

# Derandomized: the same cases on every machine, so that a failure is never a matter of luck.
SETTINGS = settings(max_examples=40, deadline=None, derandomize=True, database=None)
EPSILON = 1e-3

# Rounding of a sum over a few rewards below 10 is some 1e-15. A group whose rewards differ by rounding alone (0.1 + 0.2
# and 0.3) divides it by a spread of about 0 + EPSILON, and whitening does so once more: 1e-9.
NOISE = 1e-8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One batch of samples. Rewards stand per function; the plain estimators see their first column."""

    by_function: np.ndarray
    groups: np.ndarray
    included: np.ndarray
    loss_tokens: np.ndarray
    whiten: str
    function_weights: tuple[float, ...]

    @property
    def rewards(self) -> np.ndarray:
        return self.by_function[:, 0]

    def run(self, estimator: str, **changed) -> np.ndarray:
        case = dataclasses.replace(self, **changed)
        applied = np.where(np.isnan(case.rewards), 0.0, case.rewards)
        given = GroupRewards(totals=np.where(case.included, applied, np.nan) if estimator == "gdpo" else case.rewards,
                             groups=case.groups, included=case.included, loss_tokens=case.loss_tokens,
                             by_function=case.by_function, function_weights=case.function_weights)
        return advantages(given, estimator=estimator, epsilon=EPSILON, whiten=case.whiten)


@st.composite
def cases(draw) -> Case:
    """Draw sizes by Hypothesis, numbers by a seed. Most cases would be near copies of a few otherwise."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(0, 14))
    pool = draw(
        st.sampled_from([[0.0, 1.0], [0.3, 0.1 + 0.2], [0.0, -0.0, 1.0, -1.0, 0.5, 0.1, 0.7, 0.3, 0.1 + 0.2, 2.25]])
    )
    groups = random.choice([7, 0, 3, 40][: draw(st.integers(1, 4))], count)
    included = random.random(count) < draw(st.sampled_from([1.0, 0.7]))
    by_function = np.where(included[:, None], random.choice(pool, (count, 2)), np.nan)
    by_function[random.random(count) < 0.3, 1] = np.nan  # the second function does not apply
    return Case(by_function=by_function, groups=groups, included=included, loss_tokens=random.integers(0, 9, count),
                function_weights=draw(st.sampled_from([(1.0, 1.0), (0.5, 2.0)])),
                whiten=draw(st.sampled_from(["none", "scale", "center_and_scale"])))


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@SETTINGS
@given(case=cases())
def test_invariants(estimator: str, case: Case) -> None:
    """Assert every numbered invariant of algorithm/advantage.py on one batch."""
    found = case.run(estimator)
    centres = case.whiten == "center_and_scale" and estimator in ("gdpo", "reinforce_plus_plus")
    columns = case.by_function.T if estimator == "gdpo" else case.rewards[None]
    for group in set(case.groups.tolist()):  # 1
        member = case.included & (case.groups == group)
        if not centres and all(len(set(column[member & ~np.isnan(column)].tolist())) <= 1 for column in columns):
            assert (found[member] == 0.0).all(), (found[member], columns[:, member])

    out = ~case.included  # 2
    assert (found[out] == 0.0).all()
    assert np.array_equal(found, case.run(estimator, by_function=np.where(out[:, None], 1e6, case.by_function)))
    keep = case.included
    without = case.run(estimator, by_function=case.by_function[keep], groups=case.groups[keep], included=keep[keep],
                       loss_tokens=case.loss_tokens[keep])
    np.testing.assert_allclose(found[keep], without, rtol=0, atol=NOISE)

    shift = (case.groups % 5 - 2).astype(np.float64)[:, None]  # 3
    np.testing.assert_allclose(found, case.run(estimator, by_function=case.by_function + shift), rtol=0, atol=NOISE)

    assert found.dtype == np.float64 and np.isfinite(found).all()  # 4
    for bad in (math.inf, -math.inf, math.nan):
        if keep.any() and not (estimator == "gdpo" and math.isnan(bad)):  # NaN is gdpo's "does not apply"
            rewards, victim = case.by_function.copy(), int(np.flatnonzero(keep)[-1])
            rewards[victim, 0] = bad
            with pytest.raises(ValueError, match=f"sample index {victim} is {bad}"):
                case.run(estimator, by_function=rewards)

    assert_may_have_advantage(case, estimator, found, centres)  # 5

    assert_reduction_invariants(case)  # 6


def of_all(totals, groups, **named) -> GroupRewards:
    """Return the rewards of samples none of which was taken out."""
    totals = np.asarray(totals, dtype=np.float64)
    return GroupRewards(totals=totals, groups=np.asarray(groups), included=np.ones(len(totals), dtype=bool), **named)


def assert_may_have_advantage(case: Case, estimator: str, found: np.ndarray, centres: bool) -> None:
    may = np.zeros(len(found), dtype=bool)
    rewards = np.where(case.included, np.nan_to_num(case.rewards), np.nan)
    for half in (case.groups % 2 == 0, case.groups % 2 == 1):
        given = GroupRewards(totals=rewards[half], groups=case.groups[half], included=case.included[half],
                             by_function=case.by_function[half], function_weights=case.function_weights)
        may[half] = may_have_advantage(given, estimator=estimator, epsilon=EPSILON, whiten=case.whiten)
    assert np.array_equal(may, case.included if centres else found != 0.0)


def test_under_gae_every_included_sample_may_have_an_advantage() -> None:
    """Each sample is measured against a critic, so its group's rewards may be equal."""
    included = np.array([True, True, False, True])
    rewards = GroupRewards(totals=np.ones(4), groups=np.zeros(4, dtype=np.int64), included=included)
    assert np.array_equal(may_have_advantage(rewards, estimator="gae"), included)


def assert_reduction_invariants(case: Case) -> None:
    facts, members = make_facts(case.groups, case.loss_tokens), np.flatnonzero(case.included)
    for reduction in REDUCTIONS:
        weights = reduction_weights(reduction, facts, members, max_response_tokens=16)
        assert (weights >= 0).all() and np.isfinite(weights).all()
        assert np.array_equal(weights[members] == 0, case.loss_tokens[members] == 0)
        assert (weights[~case.included] == 0).all()
        assert np.array_equal(weights, reduction_weights(reduction, facts, members[::-1], max_response_tokens=16))
        others = make_facts(case.groups, np.where(case.included, case.loss_tokens, 999))
        assert np.array_equal(weights, reduction_weights(reduction, others, members, max_response_tokens=16))


def std_of(values: list[float]) -> float:
    """Return the unbiased deviation, over n − 1, or 0 for fewer than two values."""
    return np.std(values, ddof=1) if len(values) > 1 else 0.0


def whiten_naive(values: list[float], tokens: list[int], included: list[bool], mode: str) -> list[float]:
    """Whiten the batch written out token by token, by its mean and its unbiased spread."""
    spread_out = [v for v, t, i in zip(values, tokens, included, strict=True) if i for _ in range(t)]
    if mode == "none" or len(spread_out) < 2:
        return values
    shift = np.mean(spread_out) if mode == "center_and_scale" else 0.0
    return [(v - shift) / (std_of(spread_out) + EPSILON) if i else 0.0 for v, i in zip(values, included, strict=True)]


def advantage_naive(case: Case, estimator: str) -> list[float]:
    """Return the advantages by semantics §6, one sample at a time."""
    groups, included, tokens = case.groups.tolist(), case.included.tolist(), case.loss_tokens.tolist()

    def peers(i: int, column: list[float]) -> list[float]:
        same = [j for j in range(len(groups)) if included[j] and groups[j] == groups[i]]
        return [column[j] for j in same if not math.isnan(column[j])]

    rewards, everyone = case.rewards.tolist(), range(len(groups))
    live = [i for i in everyone if included[i] and len(peers(i, rewards)) > 1]
    centred = [rewards[i] - np.mean(peers(i, rewards)) if i in live else 0.0 for i in everyone]
    match estimator:
        case "grpo":
            return [centred[i] / (std_of(peers(i, rewards)) + EPSILON) if i in live else 0.0 for i in everyone]
        case "dr_grpo":
            return centred
        case "rloo":
            total, count = ([f(peers(i, rewards)) for i in everyone] for f in (math.fsum, len))
            return [rewards[i] - (total[i] - rewards[i]) / (count[i] - 1) if i in live else 0.0 for i in everyone]
        case "batch_std":
            spread = std_of([c for c, i in zip(centred, included, strict=True) if i])
            return [c / (spread + EPSILON) for c in centred]
        case "reinforce_plus_plus":
            return whiten_naive(centred, tokens, included, case.whiten)
        case "gdpo":
            total = [0.0] * len(groups)
            for column, weight in zip(case.by_function.T.tolist(), case.function_weights, strict=True):
                for i in everyone:
                    if included[i] and not math.isnan(column[i]):
                        same = peers(i, column)
                        total[i] += weight * (column[i] - np.mean(same)) / (std_of(same) + EPSILON)
            return whiten_naive(total, tokens, included, case.whiten)
    raise ValueError(estimator)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@SETTINGS
@given(case=cases())
def test_estimator_equals_formula(estimator: str, case: Case) -> None:
    np.testing.assert_allclose(case.run(estimator), advantage_naive(case, estimator), rtol=1e-9, atol=NOISE)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@pytest.mark.parametrize("value", [0.0, 0.3, 0.1 + 0.2, 1 / 3, 1e-30, -7e11])
def test_equal_rewards_give_exactly_zero(estimator: str, value: float) -> None:
    """The mean of 7 times 0.1 + 0.2 is not that number, and noise over a zero spread would look like signal."""
    rewards = np.array([value] * 7 + [0.0, 1.0])
    found = advantages(of_all(rewards, [0] * 7 + [1] * 2, by_function=rewards[:, None]), estimator=estimator)
    assert (found[:7] == 0.0).all() and (found[7:] != 0.0).all()


def test_rewards_that_differ_by_rounding_are_not_equal() -> None:
    """0.1 + 0.2 ≠ 0.3 as numbers: dropping their group, with its tiny signal, would not be lossless."""
    found = advantages(of_all([0.1 + 0.2, 0.3], [0, 0]), estimator="grpo")
    assert (found != 0).any() and (np.abs(found) < NOISE).all()


def test_gdpo_names_the_sample_of_an_infinite_reward_and_unknown_names_are_errors() -> None:
    """The total may hide it behind a weight of 0; the advantages would be NaN all the same."""
    named = dict(by_function=np.array([[1.0, math.inf], [0.0, 1.0]]), function_weights=(1.0, 0.0))
    with pytest.raises(ValueError, match="s0 is inf"):
        advantages(of_all([1.0, 0.0], [0, 0], sample_ids=("s0", "s1"), **named), estimator="gdpo")
    with pytest.raises(ValueError, match=r"advantage\.estimator='mean'"):
        advantages(of_all([1.0], [0]), estimator="mean")
    with pytest.raises(ValueError, match=r"loss\.reduction='mean'"):
        reduction_weights("mean", make_facts([0], [1]), np.arange(1), max_response_tokens=1)


def weight_naive(reduction: str, facts: BatchFacts, counted: list[int], i: int, max_response_tokens: int) -> float:
    """Return the weight of sample i by the table of semantics §1."""
    tokens, groups = facts.loss_tokens.tolist(), facts.groups.tolist()
    present = [j for j in counted if tokens[j] > 0]
    if i not in present:
        return 0.0
    match reduction:
        case "token_sum":
            return 1.0
        case "token_mean":
            return 1 / sum(tokens[j] for j in present)
        case "sequence_mean":
            return 1 / (len(present) * tokens[i])
        case "sequence_sum_mean":
            return 1 / len(present)
        case "sequence_sum_norm":
            return 1 / (len(present) * max_response_tokens)
        case "prompt_mean":
            prompts = {groups[j] for j in present}
            return 1 / (len(prompts) * sum(tokens[j] for j in present if groups[j] == groups[i]))
    raise ValueError(reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@SETTINGS
@given(case=cases(), seed=st.integers(0, 99))
def test_reduction_weights_equal_the_table(reduction: str, case: Case, seed: int) -> None:
    """Over any mini-batch, in any order: samples without loss tokens are in no denominator."""
    facts, random = make_facts(case.groups, case.loss_tokens), np.random.default_rng(seed)
    counted = random.permutation(np.flatnonzero(case.included))
    found = reduction_weights(reduction, facts, counted, max_response_tokens=11)
    wanted = [weight_naive(reduction, facts, counted.tolist(), i, 11) for i in range(facts.num_samples)]
    np.testing.assert_allclose(found, wanted, rtol=1e-15)  # one division each side


def of(values: list[float], groups: list[int]) -> Rewards:
    return Rewards(values=np.array(values), group=np.array(groups), included=np.ones(len(values), dtype=bool))


def test_the_examples_of_the_docstrings() -> None:
    """The estimators give the numbers of the examples in their docstrings."""
    one, third = of([1.0, 0.0, 0.0, 1.0], [0] * 4), 1 / 3
    half = pytest.approx(np.array([0.866, -0.866, -0.866, 0.866]), abs=5e-4)
    assert grpo(one, epsilon=0.0) == half
    assert dr_grpo(one).tolist() == [0.5, -0.5, -0.5, 0.5] and dr_grpo(of([1.0] * 4, [0] * 4)).tolist() == [0.0] * 4
    assert batch_std(of([1.0, 0.0, 3.0, 3.0], [0, 0, 1, 1]), epsilon=0.0) == pytest.approx(
        np.array([1.225, -1.225, 0.0, 0.0]), abs=5e-4
    )
    assert rloo(of([1.0, 0.0, 0.0, 0.0], [0] * 4)) == pytest.approx(np.array([1.0, -third, -third, -third]))
    assert reinforce_plus_plus(one, tokens=None, whiten="scale", epsilon=0.0) == half
    columns = (of([1.0, 0.0], [0, 0]), of([10.0, 0.0], [0, 0]))
    both = gdpo(columns, (1.0, 1.0), np.ones(2, dtype=bool), tokens=None, whiten="scale", epsilon=0.0)
    assert both == pytest.approx(np.array([0.707, -0.707]), abs=5e-4)

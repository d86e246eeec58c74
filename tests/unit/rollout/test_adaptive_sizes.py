"""Adaptive group sizes: the deal against a search over all deals, the memory against a naive one, refused settings."""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm.estimators import GroupRewards
from megatron_rl.config import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.rollout.groups.adaptive_sizes import PRIOR_GROUPS, PRIOR_SAMPLES, AdaptiveSizes, dealt
from megatron_rl.rollout.reward_metrics import RewardErrors, reward_metrics
from megatron_rl.rollout.scored_batch import ScoredBatch, Scoring
from megatron_rl.validate import rollouts, validate_config
from tests.unit.algorithm.facts import make_facts
from tests.unit.rollout.fake_engine import prompt_of

ADAPTIVE = ("rollout.group_sizes=adaptive", "advantage.estimator=rloo", "reward.functions=[m:f]")
VARIANCES = st.lists(st.floats(1e-4, 0.25), min_size=1, max_size=4)


def error(variances, sizes) -> float:
    """Return the variance of the sum of the groups' gradients, up to a factor."""
    return float(sum(v / (n - 1) for v, n in zip(variances, sizes, strict=True)))


def deals(count: int, least: int, most: int):
    return itertools.product(range(least, most + 1), repeat=count)


@settings(max_examples=100, deadline=None)
@given(variances=VARIANCES, mean=st.integers(2, 4))
def test_all_samples_are_dealt_nearly_as_well_as_by_a_search(variances, mean):
    """Whole numbers near the best real ones: within a sample more or less for each prompt of the best deal."""
    found, budget = dealt(variances, mean, 2, 6, spends_all=True), mean * len(variances)
    assert sum(found) == budget and min(found) >= 2 and max(found) <= 6
    best = min(error(variances, sizes) for sizes in deals(len(variances), 2, 6) if sum(sizes) == budget)
    assert error(variances, found) <= 1.35 * best + 1e-12
    assert error(variances, found) <= error(variances, [mean] * len(variances)) * 1.35


@settings(max_examples=100, deadline=None)
@given(variances=VARIANCES, mean=st.integers(2, 4))
def test_equal_variance_is_bought_with_nearly_the_fewest_samples(variances, mean):
    """The deal has at most one sample more than the fewest whole ones that reach the variance of equal groups."""
    found, wanted = dealt(variances, mean, 2, 8, spends_all=False), error(variances, [mean] * len(variances))
    fewest = min(sum(sizes) for sizes in deals(len(variances), 2, 8) if error(variances, sizes) <= wanted * (1 + 1e-9))
    assert sum(found) <= min(fewest + 1, mean * len(variances))
    assert error(variances, found) <= 1.35 * wanted


def test_deals_by_hand():
    assert dealt([0.01, 0.25], 8, 2, 32, spends_all=True) == [3, 13]  # n − 1 is 14 · (0.1, 0.5) / 0.6
    assert dealt([0.0, 0.0, 0.0], 8, 2, 32, spends_all=False) == [8, 8, 8]  # nothing is known
    assert dealt([0.2, 0.2], 8, 2, 32, spends_all=False) == [8, 8]
    assert dealt([0.0, 0.25], 8, 2, 32, spends_all=False) == [2, 8]  # the second alone has a gradient
    assert dealt([0.0, 0.25], 8, 2, 32, spends_all=True) == [2, 14]
    assert dealt([0.0, 0.25], 8, 2, 10, spends_all=True) == [6, 10]  # what no prompt may take goes to the others
    assert dealt([], 8, 2, 32, spends_all=True) == []


def scored_of(rewards: dict[int, list[float]], excluded=()) -> ScoredBatch:
    numbers = np.repeat(list(rewards), [len(values) for values in rewards.values()])
    facts, totals = make_facts(numbers.tolist(), [1] * len(numbers)), np.concatenate(list(rewards.values()))
    included = ~np.isin(np.arange(len(numbers)), excluded)
    given = GroupRewards(totals=np.where(included, totals, np.nan), groups=numbers, included=included)
    return ScoredBatch(
        batch=type("Batch", (), {"facts": facts}), rewards=given, by_function=None, overlong=None, live=None
    )


def sizes_of(*overrides: str) -> AdaptiveSizes:
    return AdaptiveSizes(load_config(None, [*ADAPTIVE, "rollout.samples_per_prompt=12", *overrides]).rollout)


def test_the_memory_equals_a_naive_one_and_goes_on_from_its_state():
    """Three rollouts over the same rows in two epochs, an excluded sample and a group that is left with one."""
    sizes, discount = sizes_of("rollout.adaptive_groups.memory_discount=0.25"), 0.25
    batches = [
        ({0: [0.0, 1.0, 1.0], 1: [1.0] * 9}, ()),
        ({0: [1.0, 1.0, 0.5], 2: [0.0, 0.0, 1.0, 1.0]}, (2,)),
        ({1: [1.0] * 9, 2: [1.0, 0.0]}, (10,)),
    ]
    freedom, squares, variances = {}, {}, []
    for epoch, (rewards, excluded) in enumerate(batches):
        prompts = {place: prompt_of(place, epoch=epoch) for place in rewards}
        sizes.note(prompts, scored_of(rewards, excluded))
        before = 0
        for place, values in rewards.items():
            kept = [value for k, value in enumerate(values) if before + k not in excluded]
            before += len(values)
            if len(kept) > 1:
                freedom[place] = discount * freedom.get(place, 0.0) + len(kept) - 1
                squares[place] = discount * squares.get(place, 0.0) + np.var(kept) * len(kept)
                variances.append(np.var(kept, ddof=1))
    ages = np.arange(len(variances))[::-1]
    pooled = np.average(variances, weights=(1 - 1 / PRIOR_GROUPS) ** ages)
    expected = [
        (PRIOR_SAMPLES * pooled + squares.get(k, 0.0)) / (PRIOR_SAMPLES + freedom.get(k, 0.0)) for k in range(4)
    ]
    prompts = {place: prompt_of(place, epoch=7) for place in range(4)}
    wanted = dict(enumerate(dealt(expected, 12, 2, 48, spends_all=False)))
    assert sizes.deal(prompts) == wanted and len(set(wanted.values())) > 1
    again = sizes_of("rollout.adaptive_groups.memory_discount=0.25")
    assert again.deal(prompts) == dict.fromkeys(range(4), 12)
    again.load_state(sizes.state())
    assert again.deal(prompts) == wanted and again.state() == sizes.state()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("advantage.estimator=grpo",), ("advantage.estimator=grpo", "rloo, dr_grpo")),
        (("loss.denominator=kept", "skip.mode=approximate"), ("loss.denominator=kept", "original")),
        (("rollout.dynamic_sampling.max_rounds=2",), ("rollout.dynamic_sampling.max_rounds=2",)),
        (("rollout.adaptive_groups.min_samples=9",), ("rollout.adaptive_groups.min_samples=9",)),
        (("rollout.adaptive_groups.max_samples=7",), ("rollout.adaptive_groups.max_samples=7",)),
        (("train.samples_per_mini_batch=12",), ("train.samples_per_mini_batch=12", "multiple")),
        (("rollout.adaptive_groups.budget=half",), ("same_variance",)),
        (("rollout.group_sizes=many",), ("fixed",)),
    ],
)
def test_what_would_bias_the_gradient_or_does_not_fit_is_refused(overrides, words):
    with pytest.raises(ConfigError) as refused:
        validate_config(
            load_config(None, [*ADAPTIVE, "rollout.samples_per_prompt=8", *overrides]), rollouts.group_sizes
        )
    assert all(word in str(refused.value) for word in words), refused.value


def test_the_settings_that_are_named_are_taken():
    for overrides in ((), ("advantage.estimator=dr_grpo",), ("train.samples_per_mini_batch=16",)):
        validate_config(
            load_config(None, [*ADAPTIVE, "rollout.samples_per_prompt=8", *overrides]), rollouts.group_sizes
        )


def test_mean_rewards_count_every_group_the_same():
    """A group of 1 and 0s in thirds beside one of 1s: the mean of their means, with an excluded sample left out."""
    scored = scored_of({0: [1.0, 0.0, 0.0, 0.0, 1.0, 0.5], 1: [1.0, 1.0]}, (5,))
    scoring = Scoring.of(
        *(getattr(load_config(None, ADAPTIVE), name) for name in ("reward", "advantage", "rollout", "loss"))
    )
    facts = dataclasses.replace(scored.facts, weight_versions=np.zeros(8, dtype=np.int64))
    column = np.array([2.0, 0.0, 0.0, 0.0, 2.0, np.nan, 4.0, 4.0])
    scored = dataclasses.replace(scored, batch=SimpleNamespace(facts=facts), by_function=column[:, None])
    found = reward_metrics(scoring, scored, RewardErrors())
    weights = np.array([1 / 6] * 5 + [0.5] * 2)
    assert found["reward/mean"] == pytest.approx(weights @ [1, 0, 0, 0, 1, 1, 1] / weights.sum())
    assert found["reward/m:f"] == pytest.approx(weights @ [2, 0, 0, 0, 2, 4, 4] / weights.sum())

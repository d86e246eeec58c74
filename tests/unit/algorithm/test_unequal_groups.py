"""Groups of unequal sizes: the expected gradient over all outcomes is that of equal groups, and varies less."""

import functools
import itertools

import numpy as np
import pytest

from megatron_rl.algorithm.advantage import advantages, reduction_weights
from megatron_rl.algorithm.estimators import GroupRewards
from megatron_rl.planning.plan import split_mini_batches
from tests.unit.algorithm.facts import make_facts

STOP, MOST = 0, 2  # a response ends with STOP, or after MOST tokens; the vocabulary is {0, 1}
RESPONSES = ((0,), (1, 0), (1, 1))
LOGITS = np.array([[-0.4, 0.9], [2.1, 0.3]])  # [prompt, position]: log-odds of token 1, the policy's parameters
REWARDS = {0: (0.0, 1.0, 0.3), 1: (0.9, 1.0, 1.0)}  # prompt → the reward of each of RESPONSES
GRADIENT_REDUCTIONS = ("token_sum", "sequence_mean", "sequence_sum_mean", "sequence_sum_norm")


def probability(prompt: int, response: tuple[int, ...]) -> float:
    ones = 1 / (1 + np.exp(-LOGITS[prompt]))
    return float(np.prod([ones[t] if token else 1 - ones[t] for t, token in enumerate(response)]))


def score(prompt: int, response: tuple[int, ...]) -> np.ndarray:
    """Return the gradient of the response's log-probability, [prompts, positions]."""
    found, ones = np.zeros_like(LOGITS), 1 / (1 + np.exp(-LOGITS[prompt]))
    for t, token in enumerate(response):
        found[prompt, t] += token - ones[t]
    return found


SCORES = np.array([[score(prompt, response) for response in RESPONSES] for prompt in REWARDS])
CHANCES = np.array([[probability(prompt, response) for response in RESPONSES] for prompt in REWARDS])


@functools.cache
def gradients(sizes, reduction: str, estimator: str, group_size: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return (probabilities [n], gradients [n, prompts, positions]) of all outcomes of groups of these sizes."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    chances, found = [], []
    for outcome in itertools.product(range(len(RESPONSES)), repeat=len(groups)):
        chosen = np.array(outcome)
        facts = make_facts(groups.tolist(), [len(RESPONSES[k]) for k in outcome])
        totals = np.array([REWARDS[g][k] for g, k in zip(groups, outcome, strict=True)])
        rewards = GroupRewards(totals=totals, groups=groups, included=np.ones(len(groups), dtype=bool))
        given = advantages(rewards, estimator=estimator, group_size=group_size)
        weights = reduction_weights(
            reduction, facts, np.arange(len(groups)), max_response_tokens=MOST, group_size=group_size
        )
        found.append(np.einsum("s,sij->ij", given * weights, SCORES[groups, chosen]))
        chances.append(CHANCES[groups, chosen].prod())
    return np.array(chances), np.array(found)


def expected(*given) -> np.ndarray:
    chances, found = gradients(*given)
    assert chances.sum() == pytest.approx(1.0, abs=1e-12)
    return np.einsum("n,nij->ij", chances, found)


@pytest.mark.parametrize(
    ("reduction", "estimator"), [*((name, "rloo") for name in GRADIENT_REDUCTIONS), ("token_sum", "dr_grpo")]
)
def test_the_expected_gradient_of_unequal_groups_is_that_of_equal_ones(reduction, estimator):
    """All 729 outcomes of two groups of 3 samples, beside all of groups of 2 and 4 samples, and of 4 and 2."""
    wanted = expected((3, 3), reduction, estimator, None)
    assert np.abs(wanted).max() > 0.01
    for sizes in ((2, 4), (4, 2)):
        np.testing.assert_allclose(expected(sizes, reduction, estimator, 3), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("estimator", "group_size"), [("rloo", None), ("dr_grpo", None), ("grpo", 3)])
def test_without_the_weights_or_with_grpo_the_expected_gradient_is_another(estimator, group_size):
    """So the test above can fail: sums over samples weigh large groups more, and GRPO's divisor depends on n."""
    wanted = expected((3, 3), "token_sum", estimator, None)
    assert np.abs(expected((2, 4), "token_sum", estimator, group_size) - wanted).max() > 1e-3


def test_samples_where_rewards_vary_lower_the_gradient_variance():
    """Prompt 0's rewards vary more than prompt 1's: at 6 samples in all, 4 and 2 beat 3 and 3, and 2 and 4 do not."""

    def variance(sizes) -> float:
        chances, found = gradients(sizes, "token_sum", "rloo", 3)
        mean = np.einsum("n,nij->ij", chances, found)
        return float(np.einsum("n,nij->", chances, (found - mean) ** 2))

    equal = variance((3, 3))
    assert variance((4, 2)) < 0.95 * equal < equal < variance((2, 4))


@pytest.mark.parametrize("reduction", [*GRADIENT_REDUCTIONS, "token_mean", "prompt_mean"])
def test_every_group_has_the_weight_of_an_equal_one(reduction):
    """With responses of one length, each group's weights add up to what they add up to among equal groups."""
    equal = make_facts([0] * 3 + [1] * 3, [5] * 6)
    unequal = make_facts([0] * 2 + [1] * 4, [5] * 6)
    given = {"max_response_tokens": 7, "group_size": 3}
    wanted, found = (reduction_weights(reduction, facts, np.arange(6), **given) for facts in (equal, unequal))
    assert found[:2].sum() == pytest.approx(wanted[:3].sum(), rel=1e-12)
    assert found[2:].sum() == pytest.approx(wanted[3:].sum(), rel=1e-12)
    plain = reduction_weights(reduction, equal, np.arange(6), max_response_tokens=7)
    assert np.array_equal(wanted, plain)  # equal groups are weighed as ever, to the bit


def test_a_mini_batch_has_whole_groups_whatever_their_sizes():
    groups = np.repeat([3, 5, 6, 9, 11], [2, 7, 3, 4, 4])
    cut = split_mini_batches(np.arange(20), 8, groups=groups, group_size=4)
    assert [part.tolist() for part in cut] == [list(range(9)), list(range(9, 16)), list(range(16, 20))]
    assert [len(part) for part in split_mini_batches(np.arange(20), 8, groups=groups)] == [8, 8, 4]

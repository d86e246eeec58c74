"""algorithm/finite.py and its callers: what is not finite is an error by name, and zero is decided exactly.

Between a reward and an advantage NaN, infinity and overflow are never "no signal", and rounding is never signal.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm.advantage import GroupRewards, advantages, may_have_advantage
from megatron_rl.algorithm.finite import LARGEST
from megatron_rl.algorithm.gae import generalised_advantages, whiten_tokens
from megatron_rl.algorithm.signal import has_signal
from megatron_rl.config import GROUP_ESTIMATORS
from megatron_rl.errors import ConfigError, NonFiniteAdvantage

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True, database=None)
BY_TOTAL = tuple(name for name in GROUP_ESTIMATORS if name != "gdpo")


def group_of(totals: list[float], **given: object) -> GroupRewards:
    """Return one group with the names s0, s1, ..., its one function giving the totals."""
    values = np.array(totals, dtype=np.float64)
    return GroupRewards(totals=values, groups=np.zeros(len(values), dtype=np.int64),
                        included=np.ones(len(values), dtype=bool), by_function=values[:, None],
                        sample_ids=tuple(f"s{i}" for i in range(len(values))), **given)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@pytest.mark.parametrize("totals", [[0.0, 1e308, -1e308], [0.0, 1e39, 0.0], [0.0, math.inf, 1.0], [0.0, math.nan, 1.0]])
def test_a_reward_beyond_float32_is_an_error_that_names_its_sample(estimator: str, totals: list[float]) -> None:
    """1e308 squared is infinity, and a difference over an infinite spread is 0: it looked like a sample to drop."""
    with pytest.raises(NonFiniteAdvantage, match=r"the reward of sample s1 is .*reward\.weights"):
        advantages(group_of(totals), estimator=estimator)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@pytest.mark.parametrize("epsilon", [math.nan, math.inf, -1e-6])
def test_an_epsilon_that_decides_what_trains_is_refused(estimator: str, epsilon: float) -> None:
    with pytest.raises(ConfigError, match=r"advantage\.epsilon=(nan|inf|-1e-06) must be a finite number"):
        advantages(group_of([1.0, 0.0]), estimator=estimator, epsilon=epsilon)


@pytest.mark.parametrize("weights", [(math.nan,), (math.inf,), (1e308,)])
def test_weights_that_overflow_a_sum_of_standardised_rewards_are_named(weights: tuple[float, ...]) -> None:
    """gdpo weighs after its standard deviations: the total may be finite where its own sum is not."""
    with pytest.raises(NonFiniteAdvantage, match=r"of sample s0 is .*look at reward\.weights=\["):
        advantages(group_of([1.0, 0.0], function_weights=weights), estimator="gdpo")


def test_an_advantage_that_overflows_names_its_sample_and_whitening_refuses_an_epsilon_of_nan() -> None:
    with pytest.raises(NonFiniteAdvantage, match=r"the advantage of sample s0 is .*e\+38, .*estimator=rloo"):
        advantages(group_of([0.9 * LARGEST, -0.9 * LARGEST]), estimator="rloo")
    with pytest.raises(ConfigError, match=r"advantage\.epsilon=nan"):
        whiten_tokens(np.array([1.0, -1.0]), np.ones(2, dtype=bool), "scale", math.nan)


@pytest.mark.parametrize("estimator", ["grpo", "batch_std"])
def test_a_spread_that_underflows_is_an_error_and_no_missing_signal(estimator: str) -> None:
    """(1e-200)² is 0: without an ε the deviation of two different rewards is 0 in float64."""
    with pytest.raises(NonFiniteAdvantage, match=r"the advantage of sample s0 is inf .*advantage\.epsilon=0"):
        advantages(group_of([1e-200, 0.0]), estimator=estimator, epsilon=0.0)
    assert (advantages(group_of([1e-200, 0.0]), estimator=estimator) != 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39])
def test_an_advantage_that_is_not_finite_is_no_missing_signal(bad: float) -> None:
    for tokens in ([3, 3], [3, 0]):
        with pytest.raises(NonFiniteAdvantage, match=r"the advantage of sample b is .*look at correction\.cap"):
            has_signal(np.array([0.5, bad]), np.array(tokens), sample_ids=("a", "b"), way_out="look at correction.cap")
    with pytest.raises(ConfigError, match=r"skip\.advantage_epsilon="):
        has_signal(np.array([0.5]), np.array([3]), advantage_epsilon=abs(bad) if math.isinf(bad) else math.nan)


@pytest.mark.parametrize(("gamma", "value", "said"), [
    (math.nan, 0.0, r"the advantage of loss token 0 of sample a is nan .*advantage\.gamma=nan"),
    (1e30, 1.0, r"the advantage of loss token 0 of sample b is .*advantage\.gamma=1e\+30"),
    (1.0, 1e39, r"the value of loss token 1 of sample b is 1e\+39 .*the critic"),
])
def test_gae_names_sample_and_settings_of_what_is_not_finite(gamma: float, value: float, said: str) -> None:
    rewards, values = np.array([0.0, 0.0, 0.0, 1.0]), np.array([0.0, 0.0, value, value])
    given = dict(gamma=gamma, lam=1.0, sample_ids=("a", "b"))
    with pytest.raises(NonFiniteAdvantage, match=said):
        generalised_advantages(rewards, values, np.ones(4, dtype=bool), np.array([1, 3]), **given)


@pytest.mark.parametrize("estimator", BY_TOTAL)
@pytest.mark.parametrize("totals",
                         [[0.0, 0.3, 0.6], [0.2, 0.4, 0.6], [0.1, 0.2, 0.3], [0.7, 1.4, 0.0], [-0.3, 0.0, 0.3]])
def test_a_reward_at_its_groups_mean_has_an_advantage_of_exactly_zero(estimator: str, totals: list[float]) -> None:
    """The mean of (0.2, 0.4, 0.6) is 0.4, and 0.4000000000000001 in float64: 5e-17 was taken for signal."""
    middle = totals.index(sorted(totals)[1])
    found = advantages(group_of(totals), estimator=estimator)
    assert found[middle] == 0.0 and (np.delete(found, middle) != 0.0).all()
    assert np.array_equal(may_have_advantage(group_of(totals), estimator=estimator), found != 0.0)


@pytest.mark.parametrize("estimator", BY_TOTAL)
@SETTINGS
@example(totals=[0.1 + 0.2, 0.3])  # one is within rounding of their mean, and not it
@given(totals=st.lists(st.sampled_from([-0.7, 0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.1 + 0.2, 1 / 3, 1.0]), max_size=9))
def test_advantages_are_zero_where_rational_numbers_say_so(estimator: str, totals: list[float]) -> None:
    """Advantages are 0 exactly where n · r_i = Σ r_j in binary or in decimals, or where float64's own mean is r_i."""
    found = advantages(group_of(totals), estimator=estimator)
    readings = [[kind(x) for x in totals] for kind in (Fraction, lambda x: Fraction(repr(x)))]
    for i, (value, advantage) in enumerate(zip(totals, found.tolist(), strict=True)):
        zero = any(len(exact) * exact[i] == sum(exact) for exact in readings)
        # 7
        assert advantage == 0.0 if zero else advantage != 0.0 or value == sum(totals) / len(totals)

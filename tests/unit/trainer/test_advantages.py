"""trainer/advantages.py: a KL in the reward or a critic's value that is not finite ends a run before a plan is made."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.algorithm.advantage import GroupRewards
from megatron_rl.config import Config, load_config
from megatron_rl.errors import NonFiniteAdvantage
from megatron_rl.trainer.advantages import critic_advantages, group_advantages, kl_penalty
from tests.unit.algorithm.facts import make_facts

MASK = np.array([True, False, True, True, False])  # of samples of two and of three tokens


def scored() -> SimpleNamespace:
    """Return one group of two samples, s0 and s1, with the rewards 1 and 0."""
    facts = make_facts(np.zeros(2, dtype=np.int64), np.array([1, 2]))
    rewards = GroupRewards(
        totals=np.array([1.0, 0.0]),
        groups=facts.groups,
        included=np.ones(2, dtype=bool),
        loss_tokens=facts.loss_tokens,
        sample_ids=facts.sample_ids,
    )
    return SimpleNamespace(facts=facts, rewards=rewards)


def penalty_of(reference: list[float]):
    return kl_penalty(
        np.zeros(len(MASK), dtype=np.float32),
        np.array(reference, dtype=np.float32),
        MASK,
        estimator="k3",
        coefficient=0.1,
        num_samples=2,
        metrics={},
    )


@pytest.mark.filterwarnings("ignore:overflow")  # it is the subject
def test_a_kl_in_the_reward_that_overflows_names_sample_and_settings() -> None:
    """e^800 is infinite: the sample's total would be −inf, and its group's advantages NaN."""
    with pytest.raises(NonFiniteAdvantage, match=r"the KL in the reward of sample s1 is inf .*loss\.kl_coef"):
        group_advantages(Config(), scored(), penalty_of([0.0, 0.0, 0.0, 800.0, 0.0]), MASK, rl_step=0)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.0, np.nan, 0.0, np.nan, 0.0], "the value of loss token 1 of sample s1 is nan"),
        ([-np.inf, 0.0, 0.0, 0.0, 0.0], "the value of loss token 0 of sample s0 is -inf"),
    ],
)
def test_a_critics_value_that_is_not_finite_names_its_token(values: list[float], said: str) -> None:
    config = load_config(None, ["advantage.estimator=gae"])
    with pytest.raises(NonFiniteAdvantage, match=rf"{said}.*the critic"):
        critic_advantages(config, scored(), np.array(values, dtype=np.float32), None, MASK)

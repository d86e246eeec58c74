"""Advantages against TRL's own GRPOTrainer and RLOOTrainer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.oracles.batch import (
    DOUBLE,
    SEEDS,
    our_advantages,
    random_batch,
    random_rewards,
)
from tests.oracles.trl_trainer import double_by_default, generating_trainer, trl, trl_scored

TRL_EPSILON = 1e-4  # what TRL adds to every standard deviation


def with_gaps(rewards: np.ndarray, seed: int) -> np.ndarray:
    """Return rewards with gaps: some functions do not apply to some samples, and none does to some others."""
    random = np.random.default_rng(seed + 2000)
    rewards = np.where(random.random(rewards.shape) < 0.15, np.nan, rewards)
    rewards[random.integers(len(rewards))] = np.nan
    rewards[-1] = 1.0  # somebody is scored
    return rewards


@pytest.mark.parametrize(("scale", "estimator"), [("group", "grpo"), ("none", "dr_grpo")])
@pytest.mark.parametrize("seed", SEEDS)
def test_group_advantages(seed: int, scale: str, estimator: str) -> None:
    batch = random_batch(seed)
    rewards = with_gaps(random_rewards(batch, seed, num_functions=2), seed)
    found = trl_scored(batch, rewards, scale_rewards=scale)["advantages"]
    torch.testing.assert_close(found, our_advantages(batch, rewards, estimator, epsilon=TRL_EPSILON), **DOUBLE)


@pytest.mark.parametrize("seed", SEEDS)
def test_batch_scale_equals_batch_std_of_equal_means(seed: int) -> None:
    """TRL's batch scale equals our batch_std where all groups share a mean.

    By definition, TRL divides by the spread of the rewards, ours by that of r − mean_g.
    """
    batch, random = random_batch(seed), np.random.default_rng(seed)
    size = int((batch.groups == 0).sum())
    own = random_rewards(batch, seed)[-size:, 0]
    shared = np.concatenate([random.permutation(own) for _ in range(len(batch.groups) // size)])[:, None]
    found = trl_scored(batch, shared, scale_rewards="batch")["advantages"]
    torch.testing.assert_close(found, our_advantages(batch, shared, "batch_std", epsilon=TRL_EPSILON), **DOUBLE)
    rewards = random_rewards(batch, seed)
    found = trl_scored(batch, rewards, scale_rewards="batch")["advantages"]
    spread = rewards.std(ddof=1) + TRL_EPSILON
    torch.testing.assert_close(found * spread, our_advantages(batch, rewards, "dr_grpo"), **DOUBLE)


@pytest.mark.parametrize("seed", SEEDS)
def test_rloo_advantages(seed: int) -> None:
    batch = random_batch(seed)
    rewards = with_gaps(random_rewards(batch, seed), seed)
    completions = [[1] * n for n in batch.response_tokens]
    generated = ([[1]] * len(completions), completions, [""] * len(completions))
    with double_by_default():
        trainer = generating_trainer(batch, rewards, _generate=lambda prompts: generated)
        found = trl.RLOOTrainer._generate_and_score_completions(trainer, [{"prompt": ""}] * len(completions))[
            "advantages"
        ]
    torch.testing.assert_close(found, our_advantages(batch, rewards, "rloo"), **DOUBLE)


@pytest.mark.parametrize("seed", SEEDS)
def test_normalize_then_sum_equals_gdpo_over_samples(seed: int) -> None:
    """TRL's normalize_then_sum equals our GDPO over samples.

    GDPO (arXiv:2601.05242) whitens over samples, as TRL; with loss_tokens ours is weighted by them, as verl's.
    """
    batch = random_batch(seed)
    rewards = with_gaps(random_rewards(batch, seed, num_functions=2), seed)
    weights = torch.tensor([0.5, 2.0], dtype=torch.float64)
    found = trl_scored(batch, rewards, multi_objective_aggregation="normalize_then_sum", reward_weights=weights)[
        "advantages"
    ]
    settings = dict(epsilon=TRL_EPSILON, whiten="center_and_scale", function_weights=(0.5, 2.0))
    torch.testing.assert_close(found, our_advantages(batch, rewards, "gdpo", **settings), **DOUBLE)

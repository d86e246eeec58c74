"""The metrics of a rollout's rewards, lengths and weight versions."""

from __future__ import annotations

import numpy as np

from megatron_rl.algorithm.advantage import group_weights
from megatron_rl.rollout.reward_errors import RewardErrors
from megatron_rl.rollout.scored_batch import ScoredBatch, Scoring


def spread(rewards: np.ndarray, weights: np.ndarray | None = None) -> dict[str, float]:
    """Return the statistics of rewards [S] by name: mean, std (of the population), min, p25, median, p75, max.

    weights: [S], how often mean and std count each reward; None: once. The others count each once.
    """
    least, quarter, median, three_quarters, largest = np.quantile(rewards, (0, 0.25, 0.5, 0.75, 1)).tolist()
    mean, std = rewards.mean(), rewards.std()
    if weights is not None:
        mean = np.average(rewards, weights=weights)
        std = np.sqrt(np.average((rewards - mean) ** 2, weights=weights))
    return {
        "mean": float(mean),
        "std": float(std),
        "min": least,
        "p25": quarter,
        "median": median,
        "p75": three_quarters,
        "max": largest,
    }


def reward_metrics(scoring: Scoring, scored: ScoredBatch, errors: RewardErrors) -> dict[str, float]:
    """Return metric name → value: ``reward/*``, and ``rollout/*`` for lengths and weight versions.

    scored: the samples of all ranks with their rewards.
    errors: how many samples of all ranks had a failing reward.
    """
    facts, rewards, settings = scored.facts, scored.rewards, scoring.reward
    included, weights = rewards.included, None
    if scoring.group_size is not None:  # every group counts the same, whatever its size
        weights = group_weights(facts.groups, scoring.group_size)
    metrics = {
        "reward/excluded": float((~included).sum()),
        "rollout/response_tokens_mean": float(facts.response_tokens.mean()),
        "rollout/weight_version_min": float(facts.weight_versions.min()),
    }
    if included.any() and settings.functions:
        counts = None if weights is None else weights[included]
        metrics |= {f"reward/{name}": value for name, value in spread(rewards.totals[included], counts).items()}
    if settings.functions:
        metrics |= {f"reward/{name}": value for name, value in errors.metrics().items()}
    if included.any() and settings.overlong_buffer_tokens:
        metrics["reward/overlong_penalty"] = settings.overlong_penalty * float(scored.overlong[included].mean())
    if scoring.mask_truncated:
        metrics["rollout/masked_truncated"] = float((included & (facts.loss_tokens == 0)).sum())
    for name, column in zip(settings.functions, scored.by_function.T, strict=True):
        if not np.isnan(column).all():
            given = ~np.isnan(column)
            counts = None if weights is None else weights[given]
            metrics[f"reward/{name}"] = float(np.average(column[given], weights=counts))
    return metrics

"""The metrics of a rollout's rewards, lengths and weight versions, and the verdict on rewards that failed.

Under ``reward.on_error`` drop, zero or retry_sample, a failed sample does not end the run. If the reward fails on
every sample of a rollout, the run ends, because it can learn nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megatron_rl.algorithm.advantage import group_weights
from megatron_rl.config import RewardConfig
from megatron_rl.distributed import collectives
from megatron_rl.errors import RewardError
from megatron_rl.rollout.scored_batch import ScoredBatch, Scoring
from megatron_rl.types import Rollout, Score

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardErrors:
    """Holds how many samples of a rollout had a failing reward, on one rank or on all ranks.

    failed: number of samples on which a reward function failed.
    scored: number of samples on which reward functions were called. Samples that an environment
        gave up are not counted.
    first: the sample's id and the message of the first failure; None if nothing failed.
    is_here: whether ``first`` happened on this rank, which then logs the warning.

    Example: sample 2 of prompt "0@0" raised, one of four samples: ``failed=1, scored=4,
    first="0@0#2: NameError: name 'gold' is not defined"``.
    """

    failed: int = 0
    scored: int = 0
    first: str | None = None
    is_here: bool = False

    @property
    def share(self) -> float:
        return self.failed / self.scored if self.scored else 0.0

    def metrics(self) -> dict[str, float]:
        return {"errors": float(self.failed), "error_share": self.share}


def count_errors(pairs: Iterable[tuple[Rollout, Score]]) -> RewardErrors:
    """Return the counts of this rank's samples and of those whose reward failed. Not a collective."""
    called = [(rollout, score) for rollout, score in pairs if rollout.excluded is None]
    failed = [f"{rollout.sample_id}: {score.error}" for rollout, score in called if score.error is not None]
    first = failed[0] if failed else None
    return RewardErrors(failed=len(failed), scored=len(called), first=first, is_here=first is not None)


def gather_errors(local: RewardErrors) -> RewardErrors:
    """Return the counts summed over all ranks. A collective. ``local``: this rank's counts."""
    parts = collectives.gather_json([local.failed, local.scored, local.first])
    first = next((first for _, _, first in parts if first is not None), None)
    return RewardErrors(
        failed=sum(failed for failed, _, _ in parts),
        scored=sum(scored for _, scored, _ in parts),
        first=first,
        is_here=first is not None and first == local.first,
    )


def judge_errors(errors: RewardErrors, config: RewardConfig, where: str) -> None:
    """Warn if the share of failures reaches ``reward.error_warning_share``; raise RewardError if all samples failed.

    If it raises, it raises on every rank.

    errors: the counts of all ranks.
    where: names the scored samples in the message, such as "rollout 3".
    """
    if not errors.failed:
        return
    if errors.failed == errors.scored:
        raise RewardError(
            f"{where}: the reward of all {errors.scored} samples failed, and under reward.on_error={config.on_error} "
            f"nothing is learned from them; mend the function. The first was {errors.first}"
        )
    if errors.is_here and errors.share >= config.error_warning_share:
        log.warning(
            "WARNING: %s: the reward of %d of %d samples failed (%.1f %%, reward.error_warning_share=%g), and "
            "reward.on_error=%s goes on without them; the first was %s",
            *(where, errors.failed, errors.scored, 100 * errors.share, config.error_warning_share, config.on_error),
            errors.first,
        )


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

"""What a rollout's groups become before the training plan: facts and rewards of all ranks, advantages, log-probs that are known already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.algorithm.advantage import advantages, may_have_advantage
from megatron_rl.algorithm.noise import with_noise
from megatron_rl.algorithm.signal import has_signal
from megatron_rl.backend import batch_exchange
from megatron_rl.backend.backend import LogProbs, MegatronBackend
from megatron_rl.backend.trainable_model import Batch
from megatron_rl.config import Config
from megatron_rl.distributed import collectives
from megatron_rl.observability.metrics import add_sums
from megatron_rl.reward.overlong import overlong_shape
from megatron_rl.rollout.worker import Group
from megatron_rl.types import BatchFacts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredBatch:
    """Groups whose rewards every rank knows. totals [S], by_function [S, F]: NaN where there is none.

    totals: with the overlong penalty, which by_function has not. overlong: [S] 0 to −1, its shape (reward/overlong.py). live: bool [S],
    whether the sample may have signal in whichever batch its group stands. step: optimizer steps of RL, ghosts included, taken before.
    """

    batch: Batch
    totals: np.ndarray
    by_function: np.ndarray
    overlong: np.ndarray
    live: np.ndarray
    step: int

    @property
    def included(self) -> np.ndarray:
        """[S] bool: samples that were not taken out of their group."""
        return ~np.isnan(self.totals)

    def live_places(self) -> set[int]:
        """Groups of which some sample may have signal, by place."""
        return set(self.batch.facts.groups[self.live].tolist())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogProbPass:
    """A log-prob pass over part of a rollout: what it covered [S] of its facts, and log-probs flat over their response tokens."""

    facts: BatchFacts
    chosen: np.ndarray
    logprobs: LogProbs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingBatch:
    """A batch to be trained: facts, rewards, advantages [S] (0 where trainer/advantages.py makes them), and what is known of its log-probs.

    old: float32 [T] flat over response tokens, 0 where not known · known: bool [S], whose log-probs are · sums: of the passes so far ·
    replayed: bool [S], of groups that an earlier rollout has trained · trained_version: the weights that it is to be trained on.
    """

    batch: Batch
    totals: np.ndarray
    by_function: np.ndarray
    advantages: np.ndarray
    old: np.ndarray
    known: np.ndarray
    replayed: np.ndarray
    trained_version: int
    sums: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def included(self) -> np.ndarray:
        """[S] bool: samples that were not taken out of their group."""
        return ~np.isnan(self.totals)

    @property
    def is_fresh(self) -> bool:
        """Whether every token comes from the weights that it is to be trained on, so that log-probs should agree."""
        return bool((self.batch.facts.weight_versions == self.trained_version).all())


def score_groups(config: Config, backend: MegatronBackend, groups: Mapping[int, Group]) -> ScoredBatch:
    """Facts and rewards of all ranks' groups, by place in the rollout; a collective. groups: this rank's."""
    size = config.rollout.samples_per_prompt
    held = [(place, groups[place]) for place in sorted(groups)]
    samples = [sample for _, group in held for sample in group.samples(mask_truncated=config.loss.mask_truncated)]
    places = [place * size + k for place, _ in held for k in range(size)]
    batch = backend.gather(samples, [place // size for place in places], places)
    scores = [score for _, group in held for score in group.scores]
    totals, by_function = batch_exchange.gather_scores(scores, places, len(config.reward.functions))
    shape = overlong_shape(
        batch.facts.response_tokens, max_response_tokens=config.rollout.max_response_tokens, buffer_tokens=config.reward.overlong_buffer_tokens
    )
    totals = totals + config.reward.overlong_penalty * shape
    columns, weights = _columns(config, by_function, shape)
    live = may_have_advantage(
        totals, batch.facts.groups, ~np.isnan(totals), estimator=config.advantage.estimator, whiten=config.advantage.whiten,
        rewards_by_function=columns, function_weights=weights, sample_ids=batch.facts.sample_ids,
    )  # fmt: skip
    return ScoredBatch(
        batch=batch, totals=totals, by_function=by_function, overlong=shape, live=live & (batch.facts.loss_tokens > 0),
        step=backend.step_index - config.sft.steps,
    )  # fmt: skip


def _columns(config: Config, by_function: np.ndarray, shape: np.ndarray) -> tuple[np.ndarray, tuple[float, ...]]:
    """(rewards [S, F or F + 1], weights) of which ``gdpo`` makes advantages: the overlong punishment is one more reward function there."""
    weights = config.reward.resolved_weights
    if not config.reward.overlong_buffer_tokens:
        return by_function, weights
    return np.column_stack([by_function, shape]), (*weights, config.reward.overlong_penalty)


def plain_advantages(config: Config, scored: ScoredBatch) -> np.ndarray:
    """[S] without noise, by the same arithmetic on every rank; 0 where they hang on values or on a KL in the reward (trainer/advantages.py)."""
    facts = scored.batch.facts
    if config.has_critic or config.kl_in_reward:
        return np.zeros(facts.num_samples)
    columns, weights = _columns(config, scored.by_function, scored.overlong)
    return advantages(
        scored.totals, facts.groups, scored.included, estimator=config.advantage.estimator, epsilon=config.advantage.epsilon,
        whiten=config.advantage.whiten, rewards_by_function=columns, function_weights=weights, loss_tokens=facts.loss_tokens,
        sample_ids=facts.sample_ids,
    )  # fmt: skip


def noisy_advantages(config: Config, scored: ScoredBatch, values: np.ndarray) -> np.ndarray:
    """[S] to be trained on, the same on every rank: with noise (algorithm/noise.py), rank 0's, where the rollout's first step is one of the first
    ``advantage.noise_steps``, in all its mini-batches and epochs. A collective then. values: ``plain_advantages``."""
    given, facts = config.advantage, scored.batch.facts
    if not given.noise_std or scored.step >= given.noise_steps:
        return values
    signal = has_signal(values, facts.loss_tokens, advantage_epsilon=config.skip.advantage_epsilon)
    return collectives.broadcast_from_rank0(with_noise(values, signal, facts.sample_ids, std=given.noise_std, seed=config.run.seed))


def merge_passes(facts: BatchFacts, passes: Sequence[LogProbPass], unchanged: set[int]) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """(old [T], known [S], sums) of a batch from passes over its parts. unchanged: groups that are still those that were passed."""
    old, known = np.zeros(int(facts.response_offsets[-1]), dtype=np.float32), np.zeros(facts.num_samples, dtype=bool)
    at, offsets = {int(place): i for i, place in enumerate(facts.places)}, facts.response_offsets
    sums: dict[str, float] = {}
    for part in passes:
        sums = add_sums(sums, part.logprobs.sums)
        starts = part.facts.response_offsets
        for i in np.flatnonzero(part.chosen):
            if int(part.facts.groups[i]) in unchanged:
                j = at[int(part.facts.places[i])]
                old[offsets[j] : offsets[j + 1]] = part.logprobs.flat[starts[i] : starts[i + 1]]
                known[j] = True
    return old, known, sums


def reward_metrics(config: Config, scored: ScoredBatch) -> dict[str, float]:
    """``reward/*`` and the length of what was generated."""
    facts, included = scored.batch.facts, scored.included
    metrics = {
        "reward/excluded": float((~included).sum()),
        "rollout/response_tokens_mean": float(facts.response_tokens.mean()),
        "rollout/weight_version_min": float(facts.weight_versions.min()),
    }
    if included.any():
        metrics["reward/mean"] = float(scored.totals[included].mean())
    if included.any() and config.reward.overlong_buffer_tokens:
        metrics["reward/overlong_penalty"] = config.reward.overlong_penalty * float(scored.overlong[included].mean())
    if config.loss.mask_truncated:
        metrics["rollout/masked_truncated"] = float((included & (facts.loss_tokens == 0)).sum())
    for name, column in zip(config.reward.functions, scored.by_function.T, strict=True):
        if not np.isnan(column).all():
            metrics[f"reward/{name}"] = float(np.nanmean(column))
    return metrics

"""What a rollout's groups become before the training plan: facts and rewards of all ranks, advantages, log-probs that are known already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_rl import exchange
from megatron_rl.advantage import advantages, may_have_advantage
from megatron_rl.backend import Batch, LogProbs, MegatronBackend
from megatron_rl.config import Config
from megatron_rl.rollout.producer import Group
from megatron_rl.types import BatchFacts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """Groups whose rewards every rank knows. totals [S], by_function [S, F]: NaN where there is none.

    live: bool [S], whether the sample may have signal in whichever batch its group stands.
    """

    batch: Batch
    totals: np.ndarray
    by_function: np.ndarray
    live: np.ndarray

    @property
    def included(self) -> np.ndarray:
        """[S] bool: samples that were not taken out of their group."""
        return ~np.isnan(self.totals)

    def live_places(self) -> set[int]:
        """Groups of which some sample may have signal, by place."""
        return set(self.batch.facts.groups[self.live].tolist())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Passed:
    """A log-prob pass over part of a rollout: what it covered [S] of its facts, and log-probs flat over their response tokens."""

    facts: BatchFacts
    chosen: np.ndarray
    logprobs: LogProbs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Intake:
    """A batch to be trained: facts, rewards, advantages [S], and what is known of its log-probs.

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


def score_groups(config: Config, backend: MegatronBackend, groups: Mapping[int, Group]) -> Scored:
    """Facts and rewards of all ranks' groups, by place in the rollout; a collective. groups: this rank's."""
    size = config.rollout.samples_per_prompt
    held = [(place, groups[place]) for place in sorted(groups)]
    samples = [sample for _, group in held for sample in group.samples()]
    places = [place * size + k for place, _ in held for k in range(size)]
    batch = backend.gather(samples, [place // size for place in places], places)
    scores = [score for _, group in held for score in group.scores]
    totals, by_function = exchange.gather_scores(scores, places, len(config.reward.functions))
    live = may_have_advantage(
        totals, batch.facts.groups, ~np.isnan(totals), estimator=config.advantage.estimator, whiten=config.advantage.whiten,
        rewards_by_function=by_function, function_weights=config.reward.resolved_weights, sample_ids=batch.facts.sample_ids,
    )  # fmt: skip
    return Scored(batch=batch, totals=totals, by_function=by_function, live=live & (batch.facts.loss_tokens > 0))


def batch_advantages(config: Config, scored: Scored) -> np.ndarray:
    """[S] by the same arithmetic on every rank."""
    facts = scored.batch.facts
    return advantages(
        scored.totals, facts.groups, scored.included, estimator=config.advantage.estimator, epsilon=config.advantage.epsilon,
        whiten=config.advantage.whiten, rewards_by_function=scored.by_function, function_weights=config.reward.resolved_weights,
        loss_tokens=facts.loss_tokens, sample_ids=facts.sample_ids,
    )  # fmt: skip


def merge_passes(facts: BatchFacts, passes: Sequence[Passed], unchanged: set[int]) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
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


def add_sums(sums: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Of two log-prob passes: sums add, the largest gap is the larger one."""
    return {name: max(sums.get(name, 0.0), value) if name.endswith("_max") else sums.get(name, 0.0) + value for name, value in more.items()}


def reward_metrics(config: Config, totals: np.ndarray, by_function: np.ndarray, facts: BatchFacts) -> dict[str, float]:
    """``reward/*`` and the length of what was generated."""
    included = ~np.isnan(totals)
    metrics = {
        "reward/excluded": float((~included).sum()),
        "rollout/response_tokens_mean": float(facts.response_tokens.mean()),
        "rollout/weight_version_min": float(facts.weight_versions.min()),
    }
    if included.any():
        metrics["reward/mean"] = float(totals[included].mean())
    for name, column in zip(config.reward.functions, by_function.T, strict=True):
        if not np.isnan(column).all():
            metrics[f"reward/{name}"] = float(np.nanmean(column))
    return metrics

"""The batch that a rollout becomes: all ranks' facts and rewards, and the log-probs known before the training plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_rl.algorithm.advantage import GroupRewards, may_have_advantage
from megatron_rl.algorithm.own_estimator import in_unequal_groups
from megatron_rl.backend import batch_exchange
from megatron_rl.backend.backend import LogProbs, MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.config import Config
from megatron_rl.observability.metrics import add_sums
from megatron_rl.reward.function import BUILT_IN
from megatron_rl.reward.overlong import overlong_shape
from megatron_rl.rollout.reward_errors import RewardErrors, count_errors, gather_errors
from megatron_rl.rollout.worker import Group
from megatron_rl.types import BatchFacts, Prompt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredBatch:
    """Holds groups whose rewards every rank knows.

    rewards:     totals with the overlong penalty in them; for ``gdpo`` that penalty is one more function.
    by_function: float64 [S, F], the configured functions alone; NaN where one did not apply.
    overlong:    float64 [S], 0 to −1, the penalty before its coefficient (reward/overlong.py).
    live:        bool [S], whether the sample may have signal, in any batch that its group joins.
    errors:      the samples whose reward failed.
    """

    batch: Batch
    rewards: GroupRewards
    by_function: np.ndarray
    overlong: np.ndarray
    live: np.ndarray
    errors: RewardErrors = field(default_factory=RewardErrors)

    @property
    def facts(self) -> BatchFacts:
        return self.batch.facts

    def live_places(self) -> set[int]:
        """Return the places of groups with a sample that may have signal."""
        return set(self.facts.groups[self.live].tolist())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogProbPass:
    """Holds the result of a log-prob pass over part of a rollout.

    facts:    the part's facts.
    chosen:   bool [S of the part], the samples that were passed.
    logprobs: flat over the part's response tokens.
    """

    facts: BatchFacts
    chosen: np.ndarray
    logprobs: LogProbs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownLogProbs:
    """Holds the old log-probs that were computed while the rest of the rollout was generated.

    values:  float32 [T], flat over the batch's response tokens, 0 where not known.
    covered: bool [S], the samples whose log-probs are known.
    sums:    of the gap to the engine's log-probs, over those passes (``MegatronBackend.forward``).
    """

    values: np.ndarray
    covered: np.ndarray
    sums: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingBatch:
    """Holds the groups of one rollout that are trained.

    known:           old log-probs that were computed already.
    replayed:        bool [S], samples of groups that an earlier rollout has trained.
    trained_version: the version of the weights that it is to be trained on.
    prompts:         of every place, the prompt of its group.
    groups:          of this rank's places, the group.
    metrics:         of rewards, staleness and the filters.
    """

    scored: ScoredBatch
    known: KnownLogProbs
    replayed: np.ndarray
    trained_version: int
    prompts: Mapping[int, Prompt] = field(default_factory=dict)
    groups: Mapping[int, Group] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def batch(self) -> Batch:
        return self.scored.batch

    @property
    def facts(self) -> BatchFacts:
        return self.scored.facts

    @property
    def is_fresh(self) -> bool:
        """Return whether every token comes from the weights to be trained, so that log-probs should agree."""
        return bool((self.facts.weight_versions == self.trained_version).all())


def score_groups(config: Config, backend: MegatronBackend, groups: Mapping[int, Group]) -> ScoredBatch:
    """Gather the facts and rewards of all ranks' groups. A collective.

    groups: this rank's, by their place in the rollout.
    """
    size = config.rollout.samples_per_prompt
    local_groups = [(place, groups[place]) for place in sorted(groups)]
    samples = [
        sample for _, group in local_groups for sample in group.samples(mask_truncated=config.loss.mask_truncated)
    ]
    places = [place * size + k for place, _ in local_groups for k in range(size)]
    batch = backend.gather(samples, [place // size for place in places], places)
    backend.require_routed(batch)
    scores = [score for _, group in local_groups for score in group.scores]
    totals, by_function = batch_exchange.gather_scores(
        scores, places, len(config.reward.functions), sample_ids=[sample.sample_id for sample in samples]
    )
    pairs = [pair for _, group in local_groups for pair in zip(group.rollouts, group.scores, strict=True)]
    return scored_batch(config, batch, totals, by_function, gather_errors(count_errors(pairs)))


def scored_batch(
    config: Config,
    batch: Batch,
    totals: np.ndarray,
    by_function: np.ndarray,
    errors: RewardErrors = RewardErrors(),  # noqa: B008 (frozen)
) -> ScoredBatch:
    """Add the overlong penalty to the totals, and find which samples may have signal.

    totals: [S], NaN where a sample is taken out of its group.
    by_function: [S, F].
    errors: the samples whose reward failed.
    """
    facts, buffer_tokens = batch.facts, config.reward.overlong_buffer_tokens
    shape = overlong_shape(
        facts.response_tokens, max_response_tokens=config.rollout.max_response_tokens, buffer_tokens=buffer_tokens
    )
    columns, weights = by_function, config.reward.resolved_weights
    if buffer_tokens:
        columns, weights = np.column_stack([by_function, shape]), (*weights, config.reward.overlong_penalty)
    rewards = GroupRewards(
        totals=totals + config.reward.overlong_penalty * shape,
        groups=facts.groups,
        included=~np.isnan(totals),
        loss_tokens=facts.loss_tokens,
        by_function=columns,
        function_weights=weights,
        sample_ids=facts.sample_ids,
    )
    settings = config.advantage
    live = may_have_advantage(
        rewards,
        estimator=settings.estimator,
        epsilon=settings.epsilon,
        whiten=settings.whiten,
        moves_equal_rewards=settings.moves_equal_rewards,
    )
    live &= facts.loss_tokens > 0
    return ScoredBatch(batch=batch, rewards=rewards, by_function=by_function, overlong=shape, live=live, errors=errors)


def kept_places(config: Config, scored: ScoredBatch) -> set[int]:
    """Return the places whose group dynamic sampling keeps: it may have signal, and its answers differ by the metric.

    DAPO keeps a group in which some answers are correct and some are not (arXiv:2503.14476, eq. 11): a penalty of their
    lengths makes no group of wrong answers worth keeping. ``rollout.dynamic_sampling.metric``: a reward function;
    ``reward``, the sum of all before the penalty; ``shaped``, signal alone; None: the first built-in function that
    compares answers, else ``reward``. A function's missing value counts as 0.

    Example: two wrong answers, of which one loses 0.5 to the overlong buffer: dropped, and kept under ``shaped``.
    """
    metric, functions = config.rollout.dynamic_sampling.metric, config.reward.functions
    if metric is None:
        metric = next((name for name in functions if name in BUILT_IN), "reward")
    if metric == "shaped" or not functions or not config.rollout.dynamic_sampling.max_rounds:
        return scored.live_places()
    values = np.nan_to_num(scored.by_function)
    column = values @ config.reward.resolved_weights if metric == "reward" else values[:, functions.index(metric)]
    mixed = in_unequal_groups(replace(scored.rewards, totals=column))
    return scored.live_places() & set(scored.facts.groups[mixed].tolist())


def merge_passes(facts: BatchFacts, passes: Sequence[LogProbPass], unchanged: set[int]) -> KnownLogProbs:
    """Put the log-probs of a rollout's parts into their places in the whole batch.

    unchanged: places whose groups were not replaced since the passes.
    """
    offsets = facts.response_offsets
    values, covered = np.zeros(int(offsets[-1]), dtype=np.float32), np.zeros(facts.num_samples, dtype=bool)
    row_of = {int(place): i for i, place in enumerate(facts.places)}
    sums: dict[str, float] = {}
    for part in passes:
        sums = add_sums(sums, part.logprobs.sums)
        starts = part.facts.response_offsets
        for i in np.flatnonzero(part.chosen):
            if int(part.facts.groups[i]) in unchanged:
                j = row_of[int(part.facts.places[i])]
                values[offsets[j] : offsets[j + 1]] = part.logprobs.flat[starts[i] : starts[i + 1]]
                covered[j] = True
    return KnownLogProbs(values=values, covered=covered, sums=sums)


def spread(rewards: np.ndarray) -> dict[str, float]:
    """Return mean, standard deviation (of all, not of a draw), least, quartiles and largest of rewards [S]."""
    least, quarter, median, three_quarters, largest = np.quantile(rewards, (0, 0.25, 0.5, 0.75, 1)).tolist()
    return {
        "mean": float(rewards.mean()),
        "std": float(rewards.std()),
        "min": least,
        "p25": quarter,
        "median": median,
        "p75": three_quarters,
        "max": largest,
    }


def reward_metrics(config: Config, scored: ScoredBatch) -> dict[str, float]:
    """Return the metrics ``reward/*``, and ``rollout/*`` of lengths and weight versions."""
    facts, rewards = scored.facts, scored.rewards
    included = rewards.included
    metrics = {
        "reward/excluded": float((~included).sum()),
        "rollout/response_tokens_mean": float(facts.response_tokens.mean()),
        "rollout/weight_version_min": float(facts.weight_versions.min()),
    }
    if included.any() and config.reward.functions:
        metrics |= {f"reward/{name}": value for name, value in spread(rewards.totals[included]).items()}
    if config.reward.functions:
        metrics |= {f"reward/{name}": value for name, value in scored.errors.metrics().items()}
    if included.any() and config.reward.overlong_buffer_tokens:
        metrics["reward/overlong_penalty"] = config.reward.overlong_penalty * float(scored.overlong[included].mean())
    if config.loss.mask_truncated:
        metrics["rollout/masked_truncated"] = float((included & (facts.loss_tokens == 0)).sum())
    for name, column in zip(config.reward.functions, scored.by_function.T, strict=True):
        if not np.isnan(column).all():
            metrics[f"reward/{name}"] = float(np.nanmean(column))
    return metrics

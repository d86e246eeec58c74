"""Batches of groups with their rewards. Every rank knows all rewards; gathered batches can be joined into one."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.algorithm.advantage import GroupRewards, may_have_advantage
from megatron_rl.backend import batch_exchange
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.config import AdvantageConfig, LossConfig, RewardConfig, RolloutConfig
from megatron_rl.rollout.job import Group
from megatron_rl.types import BatchFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Holds the settings of a sample's total reward, and of the check whether it may have signal.

    A sample has signal if its advantage is not 0.

    samples_per_prompt: the number of samples of a group, under adaptive sizes their mean.
    largest_group: the most samples that a group may have.
    group_size: ``samples_per_prompt`` where groups may be unequal, else None.
    max_response_tokens: the limit of a response in tokens. The overlong penalty begins
        ``reward.overlong_buffer_tokens`` before it.
    mask_truncated: whether samples that were cut off at the limit carry no loss.
    """

    reward: RewardConfig
    advantage: AdvantageConfig
    samples_per_prompt: int
    largest_group: int
    group_size: int | None
    max_response_tokens: int
    mask_truncated: bool

    @classmethod
    def of(cls, reward: RewardConfig, advantage: AdvantageConfig, rollout: RolloutConfig, loss: LossConfig) -> Scoring:
        return cls(
            reward=reward,
            advantage=advantage,
            samples_per_prompt=rollout.samples_per_prompt,
            largest_group=rollout.largest_group,
            group_size=rollout.unequal_group_size,
            max_response_tokens=rollout.max_response_tokens,
            mask_truncated=loss.mask_truncated,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredBatch:
    """Holds a batch of groups, with rewards that every rank knows.

    batch: lengths, ranks and weight versions of all samples (BatchFacts), and this rank's own
        samples.
    rewards: total rewards that include the overlong penalty. The advantage estimator ``gdpo`` sees
        the penalty as one more reward function.
    by_function: float64 [S, F], the values of the configured functions alone; NaN if a function did
        not apply.
    overlong: float64 [S] from −1 to 0, the result of ``overlong_shape``. Times
        ``reward.overlong_penalty`` it is the overlong penalty.
    live: bool [S], whether the sample may have signal (an advantage other than 0). The value does
        not depend on the other groups of a batch.
    """

    batch: Batch
    rewards: GroupRewards
    by_function: np.ndarray
    overlong: np.ndarray
    live: np.ndarray

    @property
    def facts(self) -> BatchFacts:
        return self.batch.facts

    def live_places(self) -> set[int]:
        """Return the positions in the rollout of the groups that have a sample with ``live`` True."""
        return set(self.facts.groups[self.live].tolist())


class GroupScorer:
    """Gathers all ranks' groups into a ScoredBatch, and joins several of these."""

    def __init__(self, scoring: Scoring, backend: MegatronBackend) -> None:
        self.scoring, self.backend = scoring, backend

    def gather(self, groups: Mapping[int, Group]) -> ScoredBatch:
        """Return one batch of all ranks' groups with their rewards. A collective.

        groups: position in the rollout → group, for this rank's groups.
        """
        size, masked = self.scoring.largest_group, self.scoring.mask_truncated
        own = [(number, groups[number]) for number in sorted(groups)]
        samples = [sample for _, group in own for sample in group.samples(mask_truncated=masked)]
        places = [number * size + k for number, group in own for k in range(len(group.rollouts))]
        batch = self.backend.gather(samples, [position // size for position in places], places)
        self.backend.check_samples(batch)
        totals, by_function = batch_exchange.gather_scores(
            [score for _, group in own for score in group.scores],
            places,
            len(self.scoring.reward.functions),
            sample_ids=[sample.sample_id for sample in samples],
        )
        return scored_batch(self.scoring, batch, totals, by_function)

    def join(self, parts: Sequence[ScoredBatch], places: Collection[int]) -> ScoredBatch:
        """Return those groups of ``parts`` whose positions in the rollout are in ``places``, as one batch.

        See ``joined``. Not a collective.
        """
        return joined(parts, places, rank=self.backend.topology.rank)


def scored_batch(scoring: Scoring, batch: Batch, totals: np.ndarray, by_function: np.ndarray) -> ScoredBatch:
    """Return the batch with its rewards: add the overlong penalty to the totals, and compute ``ScoredBatch.live``.

    totals: float64 [S], total rewards; NaN if the sample is taken out of its group.
    by_function: float64 [S, F], one column for each reward function.
    """
    facts, reward = batch.facts, scoring.reward
    buffer_tokens = reward.overlong_buffer_tokens
    shape = overlong_shape(
        facts.response_tokens, max_response_tokens=scoring.max_response_tokens, buffer_tokens=buffer_tokens
    )
    columns, weights = by_function, reward.resolved_weights
    if buffer_tokens:
        columns, weights = np.column_stack([by_function, shape]), (*weights, reward.overlong_penalty)
    rewards = GroupRewards(
        totals=totals + reward.overlong_penalty * shape,
        groups=facts.groups,
        included=~np.isnan(totals),
        loss_tokens=facts.loss_tokens,
        by_function=columns,
        function_weights=weights,
        sample_ids=facts.sample_ids,
    )
    live = may_have_advantage(
        rewards,
        estimator=scoring.advantage.estimator,
        epsilon=scoring.advantage.epsilon,
        whiten=scoring.advantage.whiten,
        moves_equal_rewards=scoring.advantage.moves_equal_rewards,
    )
    live &= facts.loss_tokens > 0
    return ScoredBatch(batch=batch, rewards=rewards, by_function=by_function, overlong=shape, live=live)


def joined(parts: Sequence[ScoredBatch], places: Collection[int], *, rank: int) -> ScoredBatch:
    """Return those groups of ``parts`` whose positions are in ``places`` as one batch, ordered by position.

    The result equals a batch in which these groups were gathered together. If several parts have a
    group at the same position, the last part's group is taken. Pure.

    parts: gathered batches. A group's values in them do not depend on which other groups were
        gathered with it.
    places: positions in the rollout.
    rank: this process's rank, whose own samples the batch holds.
    """
    # Choose in each part the rows of the places, unless a later part has the place too.
    last = {int(number): position for position, part in enumerate(parts) for number in np.unique(part.facts.groups)}
    if len(parts) == 1 and set(places) == last.keys():
        return parts[0]
    chosen = [
        np.array([number in places and last[number] == position for number in part.facts.groups.tolist()], dtype=bool)
        for position, part in enumerate(parts)
    ]
    # Join the chosen rows of all parts, and sort them by place.
    order = np.argsort(_joined([part.facts.places for part in parts], chosen), kind="stable")

    def join(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return _joined(arrays, chosen)[order]

    batch = _joined_batch([part.batch for part in parts], chosen, order, rank)
    rewards = dataclasses.replace(
        parts[0].rewards,
        totals=join([part.rewards.totals for part in parts]),
        groups=batch.facts.groups,
        included=join([part.rewards.included for part in parts]),
        loss_tokens=batch.facts.loss_tokens,
        by_function=join([part.rewards.by_function for part in parts]),
        sample_ids=batch.facts.sample_ids,
    )
    return ScoredBatch(
        batch=batch,
        rewards=rewards,
        by_function=join([part.by_function for part in parts]),
        overlong=join([part.overlong for part in parts]),
        live=join([part.live for part in parts]),
    )


def _joined(arrays: Sequence[np.ndarray], chosen: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([array[rows] for array, rows in zip(arrays, chosen, strict=True)])


def _joined_batch(batches: Sequence[Batch], chosen: Sequence[np.ndarray], order: np.ndarray, rank: int) -> Batch:
    """Return the chosen samples of several batches as one batch, as if they had been gathered together.

    chosen: for each batch, bool [samples of the batch].
    order: for each sample of the result its index among all chosen samples, counted batch after
        batch.
    rank: the rank whose own samples the result holds.
    """
    parts = [batch.facts for batch in batches]
    arrays: dict[str, np.ndarray | None] = {}
    for field in dataclasses.fields(BatchFacts):
        columns = [getattr(facts, field.name) for facts in parts]
        if field.name == "routed_shapes":  # a part may have None; beside a part with shapes that becomes zeros
            columns = [
                np.zeros((facts.num_samples, 2), dtype=np.int64) if shapes is None else shapes
                for facts, shapes in zip(parts, columns, strict=True)
            ]
        if field.name == "sample_ids":
            columns = [np.array(names, dtype=object) for names in columns]
        arrays[field.name] = None if columns[0] is None else _joined(columns, chosen)[order]
    if not arrays["routed_shapes"].any():
        arrays["routed_shapes"] = None
    owners, rows_before = arrays["owners"], arrays["owner_rows"]
    source = np.repeat(np.arange(len(parts)), [int(rows.sum()) for rows in chosen])[order]
    local = [batches[source[i]].local[rows_before[i]] for i in np.flatnonzero(owners == rank)]
    arrays["owner_rows"] = np.zeros_like(rows_before)
    for owner in np.unique(owners):
        arrays["owner_rows"][owners == owner] = np.arange(int((owners == owner).sum()))
    return Batch(facts=BatchFacts(**{**arrays, "sample_ids": tuple(arrays["sample_ids"].tolist())}), local=local)


def overlong_shape(response_tokens: np.ndarray, *, max_response_tokens: int, buffer_tokens: int) -> np.ndarray:
    """Return float64 [S], the soft punishment of each response's length; all 0 if ``buffer_tokens`` is 0.

    A response that reaches the limit L is cut off, and its reward says little about its reasoning.
    So the reward falls over the last b tokens before L (DAPO, arXiv:2503.14476, section 3.4, eq.
    13):

        R(y) = 0                                  if |y| ≤ L − b
               ((L − b) − |y|) / b                if L − b < |y| ≤ L
               −1                                 if |y| > L

    response_tokens: int64 [S], the number of tokens of each response.
    max_response_tokens: tokens, L of eq. 13 (``rollout.max_response_tokens``).
    buffer_tokens: tokens, b of eq. 13 (``reward.overlong_buffer_tokens``); b ≤ L.

    The result times ``reward.overlong_penalty`` is added to the total reward.
    Example: L = 10, b = 4: lengths (6, 7, 8, 10) → (0, −0.25, −0.5, −1).
    """
    assert buffer_tokens <= max_response_tokens, (buffer_tokens, max_response_tokens)
    if buffer_tokens == 0:
        return np.zeros(len(response_tokens))
    return np.clip((max_response_tokens - buffer_tokens - response_tokens) / buffer_tokens, -1.0, 0.0)

"""Chooses the completions of a rollout or of an evaluation that are recorded with their rewards.

They are of prompts that this rank generated, so that nothing is sent for them; the first rank generates with every
engine and every layout, and alone records them. Choosing them draws no random number and changes none of a run's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_rl.config import Config
from megatron_rl.observability.completions import TRAIN, Completion, best_to_worst, of_rollout, share_of_groups
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.rollout.worker import Group


def of_training(config: Config, taken: TrainingBatch, advantages: np.ndarray, index: int) -> list[Completion]:
    """Return completions of rollout ``index`` with the rewards and advantages that they are trained on.

    advantages: [S], of each sample. Not a collective.
    """
    if index % config.metrics.completions_every_rollouts:
        return []
    rows = {place: np.flatnonzero(taken.facts.groups == place) for place in taken.groups}  # in the group's order
    totals = taken.scored.rewards.totals
    rewards_of = {place: totals[members].tolist() for place, members in rows.items()}
    advantages_of = {place: advantages[members].tolist() for place, members in rows.items()}
    return _chosen(config, taken.groups, rewards_of, source=TRAIN, advantages=advantages_of, number=index + 1)


def of_evaluation(config: Config, name: str, groups: Mapping[int, Group]) -> list[Completion]:
    """Return completions of an evaluation set, by the reward functions alone. Not a collective.

    name: as in the evaluation's metrics, ``eval/<set>``.
    groups: this rank's groups of the set, by their places.
    """
    rewards_of = {place: [score.total for score in group.scores] for place, group in groups.items()}
    return _chosen(config, groups, rewards_of, source=name)


def _chosen(
    config: Config,
    groups: Mapping[int, Group],
    rewards_of: Mapping[int, Sequence[float | None]],
    *,
    source: str,
    advantages: Mapping[int, Sequence[float]] | None = None,
    number: int | None = None,
) -> list[Completion]:
    """Record ``metrics.log_completions`` samples of the first groups: of each the best and the worst."""
    places = sorted(groups)
    size = max((len(groups[place].rollouts) for place in places), default=0)
    chosen = []
    for place, count in zip(places, share_of_groups(len(places), size, config.metrics.log_completions), strict=True):
        group = groups[place]
        for member in best_to_worst(rewards_of[place], count):
            by_function = group.scores[member].by_function
            chosen.append(
                of_rollout(
                    group.rollouts[member],
                    source=source,
                    reward=rewards_of[place][member],
                    rewards=dict(zip(config.reward.functions, by_function, strict=True)),
                    most_chars=config.metrics.completion_chars,
                    advantage=None if advantages is None else advantages[place][member],
                    number=number,
                )
            )
    return chosen

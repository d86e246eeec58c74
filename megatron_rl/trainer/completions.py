"""The choice of the completions to record, from a rollout or an evaluation.

A rank chooses among the completions that it generated itself, so that ranks send each other none.
Only the first rank records completions: it generates samples under every engine and every parallel
layout. The choice draws no random number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.config import MetricsConfig
from megatron_rl.observability.completions import TRAIN, Completion, best_to_worst, of_rollout, share_of_groups
from megatron_rl.rollout.job import Group
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.trainer.advantages.source import AdvantageResult
from megatron_rl.trainer.records import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRules:
    """Holds the rules by which completions are chosen.

    functions:      the names of the reward functions, ``reward.functions``.
    every_rollouts: n: completions are recorded of the rollouts 0, n, 2n and so on.
    count:          completions per rollout or evaluation, ``metrics.log_completions``.
    most_chars:     the length, in characters, to which each text is cut, roughly.
    """

    functions: Sequence[str]
    every_rollouts: int
    count: int
    most_chars: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedCompletions(Record):
    """Records completions of trained rollouts.

    show: a function that takes the list of chosen completions and writes it with the next optimizer
        step's row of metrics (``Records.show``).
    """

    rules: CompletionRules
    show: Callable[[Sequence[Completion]], None]

    def rollout(self, index: int, taken: TrainingBatch, result: AdvantageResult) -> Mapping[str, float]:
        """Choose completions of rollout ``index`` and pass them to ``show``; return {} (no metrics)."""
        self.show(of_training(self.rules, taken, result.advantages.of_sample, index))
        return {}


def completion_rules(metrics: MetricsConfig, functions: Sequence[str]) -> CompletionRules:
    """Return the rules by which a run chooses the completions that it records.

    functions: the names of the run's reward functions.
    """
    return CompletionRules(
        functions=functions,
        every_rollouts=metrics.completions_every_rollouts,
        count=metrics.log_completions,
        most_chars=metrics.completion_chars,
    )


def of_training(rules: CompletionRules, taken: TrainingBatch, advantages: np.ndarray, index: int) -> list[Completion]:
    """Return chosen completions of rollout ``index``, with their rewards and advantages; [] if none are due.

    Not a collective.

    taken: the rollout's samples and rewards.
    advantages: [S], the advantage of each sample.
    """
    if index % rules.every_rollouts:
        return []
    groups, totals = taken.facts.groups, taken.scored.rewards.totals

    def numbers(place: int) -> tuple[list[float], list[float]]:
        members = np.flatnonzero(groups == place)  # in the group's order
        return totals[members].tolist(), advantages[members].tolist()

    return _chosen(rules, taken.groups, numbers, source=TRAIN, number=index + 1)


def of_evaluation(rules: CompletionRules, name: str, groups: Mapping[int, Group]) -> list[Completion]:
    """Return chosen completions of an evaluation set with their rewards, without advantages. Not a collective.

    name: the set's name in the metrics, ``eval/<set>``.
    groups: this rank's groups of the set; a key is the prompt's index in the evaluation.
    """

    def numbers(place: int) -> tuple[list[float | None], list[None]]:
        totals = [score.total for score in groups[place].scores]
        return totals, [None] * len(totals)

    return _chosen(rules, groups, numbers, source=name)


def _chosen(
    rules: CompletionRules,
    groups: Mapping[int, Group],
    numbers: Callable[[int], tuple[Sequence[float | None], Sequence[float | None]]],
    *,
    source: str,
    number: int | None = None,
) -> list[Completion]:
    """Return up to ``rules.count`` samples: the best and the worst of each group, in the order of prompt indices.

    If there are too few groups, each gives more than two samples.

    groups: prompt's index → group, for this rank's prompts.
    numbers: a function that takes a prompt's index. It returns two lists, the rewards and the
        advantages of that prompt's samples.
    source, number: fields of each completion: where it comes from, and its rollout's number.
    """
    places = sorted(groups)
    size = max((len(group.rollouts) for group in groups.values()), default=0)
    chosen = []
    for number_of_group, count in zip(places, share_of_groups(len(places), size, rules.count), strict=True):
        if not count:
            break
        group, (rewards, advantages) = groups[number_of_group], numbers(number_of_group)
        for member in best_to_worst(rewards, count):
            by_function = group.scores[member].by_function
            chosen.append(
                of_rollout(
                    group.rollouts[member],
                    source=source,
                    reward=rewards[member],
                    rewards=dict(zip(rules.functions, by_function, strict=True)),
                    most_chars=rules.most_chars,
                    advantage=advantages[member],
                    number=number,
                )
            )
    return chosen

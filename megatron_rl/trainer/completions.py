"""Chooses the completions of a rollout or of an evaluation that are recorded; saves whole rollouts.

Completions are of prompts that this rank generated, so that nothing is sent for them; the first rank generates with
every engine and every layout, and alone records them. Choosing them draws no random number and changes none of a run's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from megatron_rl.config import Config
from megatron_rl.observability.completions import TRAIN, Completion, best_to_worst, of_rollout, share_of_groups
from megatron_rl.observability.saved_rollouts import sample_row, token_texts, write_rollout
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.rollout.worker import Group
from megatron_rl.types import Advantages


def of_training(config: Config, taken: TrainingBatch, advantages: np.ndarray, index: int) -> list[Completion]:
    """Return completions of rollout ``index`` with the rewards and advantages that they are trained on.

    advantages: [S], of each sample. Not a collective.
    """
    if index % config.metrics.completions_every_rollouts:
        return []
    groups, totals = taken.facts.groups, taken.scored.rewards.totals

    def numbers(place: int) -> tuple[list[float], list[float]]:
        members = np.flatnonzero(groups == place)  # in the group's order
        return totals[members].tolist(), advantages[members].tolist()

    return _chosen(config, taken.groups, numbers, source=TRAIN, number=index + 1)


def save_rollout(
    config: Config, taken: TrainingBatch, advantages: Advantages, index: int, *, tokenizer: object, rank: int
) -> None:
    """Save this rank's groups of rollout ``index`` whole, where ``metrics.save_rollouts`` asks for it.

    Not a collective: a rank writes the samples that it generated, with the rewards and advantages that all ranks know.
    """
    if not config.metrics.save_rollouts or index % config.metrics.completions_every_rollouts or not taken.groups:
        return
    facts, totals = taken.facts, taken.scored.rewards.totals
    ends = np.cumsum(facts.response_tokens)
    groups, seen = [], set()
    for place in sorted(taken.groups):
        group, samples = taken.groups[place], []
        for member, row in enumerate(np.flatnonzero(facts.groups == place).tolist()):
            rollout = group.rollouts[member]
            of_token = None
            if advantages.of_token is not None:
                of_token = advantages.of_token[ends[row] - facts.response_tokens[row] : ends[row]].tolist()
            elif rollout.loss_mask is not None:  # the environment's tokens have none
                of_token = (advantages.of_sample[row] * np.array(rollout.loss_mask)).tolist()
            seen.update(rollout.response_ids)
            samples.append(
                sample_row(
                    sample=rollout.sample_index,
                    ids=rollout.response_ids,
                    advantage=float(advantages.of_sample[row]),
                    advantages=of_token,
                    reward=float(totals[row]),
                    rewards=group.scores[member].by_function,
                    finish_reason=rollout.finish_reason,
                    weight_version=rollout.weight_version,
                    excluded=rollout.excluded,
                )
            )
        prompt = group.rollouts[0].prompt
        answer = prompt.columns.get("answer")
        groups.append(
            {
                "prompt": prompt.text,
                "prompt_id": prompt.name,
                "answer": None if answer is None else str(answer),
                "samples": samples,
            }
        )
    document = {
        "functions": list(config.reward.functions),
        "tokens": {str(id): text for id, text in token_texts(tokenizer, seen).items()},
        "groups": groups,
    }
    write_rollout(config.run.path, index + 1, rank, document)


def of_evaluation(config: Config, name: str, groups: Mapping[int, Group]) -> list[Completion]:
    """Return completions of an evaluation set, by the reward functions alone. Not a collective.

    name: as in the evaluation's metrics, ``eval/<set>``.
    groups: this rank's groups of the set, by their places.
    """

    def numbers(place: int) -> tuple[list[float | None], list[None]]:
        totals = [score.total for score in groups[place].scores]
        return totals, [None] * len(totals)

    return _chosen(config, groups, numbers, source=name)


def _chosen(
    config: Config,
    groups: Mapping[int, Group],
    numbers: Callable[[int], tuple[Sequence[float | None], Sequence[float | None]]],
    *,
    source: str,
    number: int | None = None,
) -> list[Completion]:
    """Record ``metrics.log_completions`` samples of the first groups: of each the best and the worst.

    numbers: returns the rewards and the advantages of a place's group.
    """
    places = sorted(groups)
    size = max((len(groups[place].rollouts) for place in places), default=0)
    chosen = []
    for place, count in zip(places, share_of_groups(len(places), size, config.metrics.log_completions), strict=True):
        if not count:
            break
        group, (rewards, advantages) = groups[place], numbers(place)
        for member in best_to_worst(rewards, count):
            by_function = group.scores[member].by_function
            chosen.append(
                of_rollout(
                    group.rollouts[member],
                    source=source,
                    reward=rewards[member],
                    rewards=dict(zip(config.reward.functions, by_function, strict=True)),
                    most_chars=config.metrics.completion_chars,
                    advantage=advantages[member],
                    number=number,
                )
            )
    return chosen

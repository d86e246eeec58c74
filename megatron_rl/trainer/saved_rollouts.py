"""The record of whole rollouts, saved as files (``metrics.save_rollouts``, observability/saved_rollouts.py)."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.observability.saved_rollouts import sample_row, token_texts, write_rollout
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.trainer.advantages.source import AdvantageResult
from megatron_rl.trainer.records import Record
from megatron_rl.types import Advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRollouts(Record):
    """Saves whole rollouts as files: each rank saves the groups that it generated.

    folder:         the run's folder.
    functions:      the names of the reward functions, ``reward.functions``.
    every_rollouts: n: the rollouts 0, n, 2n and so on are saved.
    """

    folder: pathlib.Path
    functions: Sequence[str]
    every_rollouts: int
    tokenizer: object
    rank: int

    def rollout(self, index: int, taken: TrainingBatch, result: AdvantageResult) -> Mapping[str, float]:
        """Save this rank's groups of rollout ``index`` with their rewards and advantages, if due; return no metrics."""
        if taken.groups and index % self.every_rollouts == 0:
            groups, token_ids = saved_groups(taken, result.advantages)
            document = {
                "functions": list(self.functions),
                "tokens": {str(id): text for id, text in token_texts(self.tokenizer, token_ids).items()},
                "groups": groups,
            }
            write_rollout(self.folder, index + 1, self.rank, document)
        return {}


def saved_groups(taken: TrainingBatch, advantages: Advantages) -> tuple[list[dict[str, object]], set[int]]:
    """Return (this rank's groups as dicts in a saved rollout's format, the token ids of their responses)."""
    facts, totals = taken.facts, taken.scored.rewards.totals
    ends = np.cumsum(facts.response_tokens)
    groups, seen = [], set()
    for place in sorted(taken.groups):
        group, samples = taken.groups[place], []
        for member, row in enumerate(np.flatnonzero(facts.groups == place).tolist()):
            rollout = group.rollouts[member]
            # The advantages of the response's tokens, if they differ.
            of_token = None
            if advantages.of_token is not None:
                of_token = advantages.of_token[ends[row] - facts.response_tokens[row] : ends[row]].tolist()
            elif rollout.loss_mask is not None:  # tokens of the environment have no advantage
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
    return groups, seen

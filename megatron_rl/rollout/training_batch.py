"""The training batch of a rollout: the groups to be trained, and the old log-probs that are known already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.backend.backend import LogProbs
from megatron_rl.backend.batch import Batch
from megatron_rl.observability.metrics import add_sums
from megatron_rl.rollout.job import Group
from megatron_rl.rollout.scored_batch import ScoredBatch
from megatron_rl.types import BatchFacts, Prompt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogProbPass:
    """Holds the log-probs of a forward pass over one part of a rollout, run while other parts were still generated.

    facts: what every rank knows of the part's samples, such as their lengths.
    chosen: bool [samples of the part], the samples that the pass covers.
    logprobs: the log-probs, flat over the part's response tokens.
    """

    facts: BatchFacts
    chosen: np.ndarray
    logprobs: LogProbs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownLogProbs:
    """Holds the old log-probs that were computed while the rest of the rollout was generated.

    values: float32 [T], flat over the batch's response tokens; 0 for tokens of samples that are not
        covered.
    covered: bool [S], the samples whose log-probs are known.
    sums: ``LogProbs.sums`` of all passes, combined. They measure the gap between the trainer's and
        the engine's log-probs.
    """

    values: np.ndarray
    covered: np.ndarray
    sums: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingBatch:
    """Holds the groups that are trained for one rollout.

    scored: the batch of the groups, with their rewards.
    known: the old log-probs that are computed already.
    replayed: bool [S], True for samples of groups that were trained before, with an earlier
        rollout.
    trained_version: the trainer's weight version before the first step on the batch.
    prompts: position in the rollout → prompt, for the groups of all ranks.
    groups: position in the rollout → group, for this rank's groups.
    metrics: the metrics of rewards, staleness and group filters.
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
        """Return whether the trainer's current weights sampled every token.

        If so, the trainer's log-probs should agree with the engine's.
        """
        return bool((self.facts.weight_versions == self.trained_version).all())


def merge_passes(facts: BatchFacts, passes: Sequence[LogProbPass], unchanged: set[int]) -> KnownLogProbs:
    """Return the log-probs of forward passes over parts of a rollout, arranged for the whole batch.

    facts: what every rank knows of the whole batch's samples.
    unchanged: the positions in the rollout whose groups are still those of the passes. The groups at
        other positions were replaced; their log-probs are not known.
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

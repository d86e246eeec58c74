"""The groups of a rollout that are to be trained, by their place in it; a filter returns a new selection."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from megatron_rl.rollout.scored_batch import ScoredBatch
from megatron_rl.rollout.worker import Group, RolloutJob
from megatron_rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Holds one group for each place of a batch.

    prompts:  of every rank's places, the prompt that the batch's group answers; for a replayed
              group, the prompt whose group it replaces.
    groups:   of this rank's places, the group.
    scored:   the groups' facts and rewards, of all ranks.
    live:     places whose group may have signal.
    replaced: places that have another group than the rollout had.
    replayed: places whose group an earlier rollout has trained.
    metrics:  of the filters.

    Example: places 0 and 1, of which 1 has no signal: ``refill({1: prompt}, {1: group}, {1},
    scored)`` leaves no place dead, and ``replaced == {1}``.
    """

    prompts: Mapping[int, Prompt]
    groups: Mapping[int, Group]
    scored: ScoredBatch
    live: frozenset[int]
    replaced: frozenset[int] = frozenset()
    replayed: frozenset[int] = frozenset()
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of_job(cls, job: RolloutJob, scored: ScoredBatch) -> Selection:
        """Return the selection of a finished job's groups that are in the scored batch."""
        places = set(scored.facts.groups.tolist())
        return cls(
            prompts={number: job.prompts[number] for number in sorted(places)},
            groups={number: group for number, group in job.groups().items() if number in places},
            scored=scored,
            live=frozenset(scored.live_places()),
        )

    @property
    def dead(self) -> list[int]:
        """Return the places whose group has no signal, ascending."""
        return sorted(set(self.prompts) - self.live)

    def refill(
        self, prompts: Mapping[int, Prompt], groups: Mapping[int, Group], live: Collection[int], scored: ScoredBatch
    ) -> Selection:
        """Return a selection with further prompts' groups in the places that they name.

        prompts: the new prompt of each of these places.
        groups:  the new groups of this rank's places among them.
        live:    the places among them whose group may have signal.
        scored:  the whole selection's groups from now on.
        """
        return replace(
            self,
            prompts={**self.prompts, **prompts},
            groups=self._with_groups(prompts, groups),
            scored=scored,
            live=self.live | frozenset(live),
            replaced=self.replaced | frozenset(prompts),
        )

    def replay(self, places: Collection[int], groups: Mapping[int, Group], scored: ScoredBatch) -> Selection:
        """Return a selection with replayed ``groups`` (those of this rank) in ``places``, whose prompts stay."""
        return replace(
            self,
            groups=self._with_groups(places, groups),
            scored=scored,
            replaced=self.replaced | frozenset(places),
            replayed=self.replayed | frozenset(places),
        )

    def narrowed(self, live: Collection[int]) -> Selection:
        """Return the selection in which only places of ``live`` may have signal."""
        return replace(self, live=self.live & frozenset(live))

    def measured(self, metrics: Mapping[str, float]) -> Selection:
        """Return the selection with further metrics."""
        return replace(self, metrics={**self.metrics, **metrics})

    def _with_groups(self, places: Collection[int], groups: Mapping[int, Group]) -> dict[int, Group]:
        return {**{place: group for place, group in self.groups.items() if place not in places}, **groups}

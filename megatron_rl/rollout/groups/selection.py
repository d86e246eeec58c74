"""The selection of a rollout's groups to be trained, one for each place. A filter returns a new selection."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from megatron_rl.rollout.scored_batch import ScoredBatch
from megatron_rl.rollout.worker import Group, RolloutJob
from megatron_rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Holds one group for each place of a batch.

    prompts:  place → the prompt of its group, of all ranks. A replayed group's place keeps the
              prompt of the group that was replaced.
    groups:   place → group, for this rank's places.
    scored:   the groups' facts and rewards, of all ranks.
    live:     places whose group may have signal.
    replaced: places whose group is not the rollout's own.
    replayed: places whose group an earlier rollout has trained.
    metrics:  metrics of the filters.

    Example: of places 0 and 1, place 1 has no signal. After ``refill({1: prompt}, {1: group}, {1},
    scored)`` no place is dead, and ``replaced == {1}``.
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
        """Return the selection with those groups of a finished job that are in the scored batch."""
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
        """Return a selection with the groups of further prompts in some places.

        prompts: place → its new prompt, of all ranks.
        groups:  place → its new group, for this rank's places.
        live:    the new groups' places that may have signal.
        scored:  facts and rewards of all groups of the new selection.
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
        """Return a selection with replayed groups in ``places``. The places keep their prompts.

        groups: place → replayed group, for this rank's places.
        """
        return replace(
            self,
            groups=self._with_groups(places, groups),
            scored=scored,
            replaced=self.replaced | frozenset(places),
            replayed=self.replayed | frozenset(places),
        )

    def narrowed(self, live: Collection[int]) -> Selection:
        """Return the selection in which no place outside ``live`` counts as live."""
        return replace(self, live=self.live & frozenset(live))

    def measured(self, metrics: Mapping[str, float]) -> Selection:
        """Return the selection with further metrics."""
        return replace(self, metrics={**self.metrics, **metrics})

    def _with_groups(self, places: Collection[int], groups: Mapping[int, Group]) -> dict[int, Group]:
        return {**{place: group for place, group in self.groups.items() if place not in places}, **groups}

"""The class ``Selection``: the groups of a rollout that are to be trained, and the changes that filters make."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from megatron_rl.rollout.scored_batch import ScoredBatch
from megatron_rl.rollout.worker import Group, RolloutJob
from megatron_rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Holds one group for each place of a rollout; a place is a group's number in the rollout. Immutable.

    prompts: place → the prompt of its group, for the groups of all ranks. The place of a replayed
        group keeps the prompt of the group that was replaced.
    groups: place → group, for this rank's places.
    scored: the groups' facts and rewards, for the groups of all ranks.
    live: places whose group may have signal (a non-zero advantage).
    replaced: places whose group a filter has replaced.
    replayed: places whose group was already trained in an earlier rollout.
    metrics: metric name → value, from the filters.

    Example: in a selection of places 0 and 1, only 0 has signal: ``live == {0}``. Then ``refill``
    puts a group that has signal at place 1: ``live == {0, 1}`` and ``replaced == {1}``.
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
        """Return a selection of those groups of a finished job that are in ``scored``."""
        places = set(scored.facts.groups.tolist())
        return cls(
            prompts={number: job.prompts[number] for number in sorted(places)},
            groups={number: group for number, group in job.groups().items() if number in places},
            scored=scored,
            live=frozenset(scored.live_places()),
        )

    @property
    def dead(self) -> list[int]:
        """Return the places whose group has no signal (that are not in ``live``), in ascending order."""
        return sorted(set(self.prompts) - self.live)

    def refill(
        self, prompts: Mapping[int, Prompt], groups: Mapping[int, Group], live: Collection[int], scored: ScoredBatch
    ) -> Selection:
        """Return a selection in which groups of further prompts replace the groups at some places.

        prompts: replaced place → its new prompt, for the groups of all ranks.
        groups: replaced place → its new group, for this rank's places.
        live: the replaced places whose new group may have signal (a non-zero advantage).
        scored: facts and rewards of all groups of the new selection.
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
        """Return a selection in which replayed groups replace the groups at ``places``; its prompts are unchanged.

        places: the replaced places, of all ranks.
        groups: replaced place → replayed group, for the places whose new group this rank holds.
        scored: facts and rewards of all groups of the new selection.
        """
        return replace(
            self,
            groups=self._with_groups(places, groups),
            scored=scored,
            replaced=self.replaced | frozenset(places),
            replayed=self.replayed | frozenset(places),
        )

    def narrowed(self, live: Collection[int]) -> Selection:
        """Return the selection whose field ``live`` keeps only the places that are also in the argument ``live``."""
        return replace(self, live=self.live & frozenset(live))

    def measured(self, metrics: Mapping[str, float]) -> Selection:
        """Return the selection with ``metrics`` (name → value) added to its metrics."""
        return replace(self, metrics={**self.metrics, **metrics})

    def _with_groups(self, places: Collection[int], groups: Mapping[int, Group]) -> dict[int, Group]:
        return {**{place: group for place, group in self.groups.items() if place not in places}, **groups}

"""The groups of a rollout that are to be trained, by their place in it. Filters return a new selection and leave theirs
as it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from megatron_rl.rollout.worker import Group, RolloutJob
from megatron_rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """One group for each place of a batch.

    prompts:  of every rank's places, the prompt that the batch's group answers; of a replayed one, the prompt that it
              stands in for.
    groups:   of this rank's places, the group.
    live:     places whose group may have signal.
    replaced: places that have another group than the rollout had; replayed: those whose group an earlier rollout has
    trained.

    Example: places 0 and 1, of which 1 has no signal: ``refill({1: prompt}, {1: group}, {1})`` leaves no place dead,
    and ``replaced == {1}``.
    """

    prompts: Mapping[int, Prompt]
    groups: Mapping[int, Group]
    live: frozenset[int]
    replaced: frozenset[int] = frozenset()
    replayed: frozenset[int] = frozenset()

    @classmethod
    def of_job(cls, job: RolloutJob, places: Collection[int], live: Collection[int]) -> Selection:
        """Select the places of a finished job."""
        return cls(
            prompts={place: job.prompts[place] for place in sorted(places)},
            groups={place: group for place, group in job.groups().items() if place in places},
            live=frozenset(live) & frozenset(places),
        )

    @property
    def dead(self) -> list[int]:
        """Return the places whose group has no signal, ascending."""
        return sorted(set(self.prompts) - self.live)

    def refill(self, prompts: Mapping[int, Prompt], groups: Mapping[int, Group], live: Collection[int]) -> Selection:
        """Put further prompts' groups in some places.

        prompts: of every such place.
        groups:  of such places, those that are this rank's.
        live:    such places whose group may have signal.
        """
        return replace(
            self,
            prompts={**self.prompts, **prompts},
            groups=self._with_groups(prompts, groups),
            live=self.live | frozenset(live),
            replaced=self.replaced | frozenset(prompts),
        )

    def replay(self, places: Collection[int], groups: Mapping[int, Group]) -> Selection:
        """Put replayed groups in some places, whose prompts stay. groups: of such places, those that are this
        rank's."""
        return replace(
            self,
            groups=self._with_groups(places, groups),
            replaced=self.replaced | frozenset(places),
            replayed=self.replayed | frozenset(places),
        )

    def _with_groups(self, places: Collection[int], groups: Mapping[int, Group]) -> dict[int, Group]:
        return {**{place: group for place, group in self.groups.items() if place not in places}, **groups}

"""The groups of a rollout that are to be trained, by their place in it; a filter returns a new selection."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from megatron_rl.rollout.worker import Group, RolloutJob
from megatron_rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Holds one group for each place of a batch.

    prompts:  of every rank's places, the prompt that the batch's group answers; for a replayed group, the prompt whose
              group it replaces.
    groups:   of this rank's places, the group.
    live:     places whose group may have signal.
    replaced: places that have another group than the rollout had.
    replayed: places whose group an earlier rollout has trained.

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
        """Return the selection of some places of a finished job."""
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
        """Return a selection with further prompts' groups in the places that they name.

        prompts: the new prompt of each of these places.
        groups:  the new groups of this rank's places among them.
        live:    the places among them whose group may have signal.
        """
        return replace(
            self,
            prompts={**self.prompts, **prompts},
            groups=self._with_groups(prompts, groups),
            live=self.live | frozenset(live),
            replaced=self.replaced | frozenset(prompts),
        )

    def replay(self, places: Collection[int], groups: Mapping[int, Group]) -> Selection:
        """Return a selection with replayed ``groups`` (those of this rank) in ``places``, whose prompts stay."""
        return replace(
            self,
            groups=self._with_groups(places, groups),
            replaced=self.replaced | frozenset(places),
            replayed=self.replayed | frozenset(places),
        )

    def _with_groups(self, places: Collection[int], groups: Mapping[int, Group]) -> dict[int, Group]:
        return {**{place: group for place, group in self.groups.items() if place not in places}, **groups}

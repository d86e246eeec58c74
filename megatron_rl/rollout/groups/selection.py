"""The class ``Selection``: the groups of a rollout that are to be trained, and the changes that filters make."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from megatron_rl.rollout.job import Group, RolloutJob
from megatron_rl.rollout.scored_batch import ScoredBatch
from megatron_rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Holds the groups of a rollout by their number in it. A group that replaces another takes its number. Immutable.

    prompts: group number → prompt, for the groups of all ranks. A replayed group's number leads to
        the prompt of the group that it replaced, not to its own prompt.
    groups: group number → group, for this rank's groups.
    scored: the groups' facts and rewards, for the groups of all ranks.
    live: the numbers of the groups that may have signal (a non-zero advantage).
    replaced: the numbers of the groups that a filter has put in place of others.
    replayed: the numbers of the groups that were already trained in an earlier rollout.
    metrics: metric name → value, from the filters.

    Example: of the groups 0 and 1, only 0 has signal: ``live == {0}``. Then ``refill`` replaces
    group 1 by a group that has signal: ``live == {0, 1}`` and ``replaced == {1}``.
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
        """Return the numbers of the groups without signal (all that ``live`` does not contain), ascending."""
        return sorted(set(self.prompts) - self.live)

    def refill(
        self, prompts: Mapping[int, Prompt], groups: Mapping[int, Group], live: Collection[int], scored: ScoredBatch
    ) -> Selection:
        """Return a selection in which groups of further prompts replace some of the groups.

        prompts: a replaced group's number → the new prompt, for the groups of all ranks.
        groups: a replaced group's number → the new group, for this rank's groups.
        live: the numbers of the new groups that may have signal (a non-zero advantage).
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
        """Return a selection in which groups from the replay buffer replace the groups ``places``.

        The field ``prompts`` is unchanged.

        places: the numbers of the replaced groups, of all ranks.
        groups: a replaced group's number → the new group, for the new groups that this rank holds.
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
        """Return the selection whose field ``live`` keeps only the numbers that are also in the argument ``live``."""
        return replace(self, live=self.live & frozenset(live))

    def measured(self, metrics: Mapping[str, float]) -> Selection:
        """Return the selection with ``metrics`` (name → value) added to its metrics."""
        return replace(self, metrics={**self.metrics, **metrics})

    def _with_groups(self, places: Collection[int], groups: Mapping[int, Group]) -> dict[int, Group]:
        return {**{place: group for place, group in self.groups.items() if place not in places}, **groups}

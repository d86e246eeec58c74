"""The interfaces of the parts that choose a rollout's groups, and the stand-ins for parts that a run does not use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_rl.rollout.groups.selection import Selection
from megatron_rl.rollout.scored_batch import ScoredBatch
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.rollout.worker import Group, RolloutJob
from megatron_rl.types import BatchFacts, Prompt


class GroupFilter(Protocol):
    """Replaces groups without signal by other groups, before a rollout is trained."""

    def fill(self, index: int, selection: Selection) -> Selection:
        """Return the selection of rollout ``index`` with other groups in the places without signal. A collective."""
        ...


class StartOrder(Protocol):
    """Orders the groups that a rollout starts. Its methods are not collectives."""

    def arrange(self, prompts: Mapping[int, Prompt]) -> dict[int, Prompt]: ...

    def note(self, prompts: Mapping[int, Prompt], facts: BatchFacts) -> None:
        """Take in the facts of a rollout's scored groups, such as their response lengths.

        prompts: a group's place in the rollout → its prompt; holds the groups of all ranks.
        facts: ``facts.groups`` holds each sample's place.
        """
        ...

    def state(self) -> dict[str, int]: ...

    def load_state(self, lengths: Mapping[str, int]) -> None: ...


class Reroll(Protocol):
    """Chooses prompts that are sampled again. Its methods are not collectives."""

    def take(self, fraction: float, room: int) -> list[tuple[str, int]]:
        """Return (prompt_id, attempt) of at most ``room`` prompts to sample again now.

        fraction: the fraction of the training that is done, 0 to 1.
        """
        ...

    def note(self, scored: ScoredBatch, prompts: Mapping[int, Prompt], fresh: Collection[int]) -> None:
        """Take in a rollout's scored groups, to choose prompts among them.

        prompts: a group's place in the rollout → its prompt; holds the groups of all ranks.
        fresh: the places of the groups that are not too old to be trained.
        """
        ...

    def metrics(self) -> dict[str, float]: ...

    def state(self) -> dict: ...

    def load_state(self, state: Mapping) -> None: ...


class Replay(Protocol):
    """Keeps trained groups, to be trained again. Its methods are not collectives.

    groups: ``Prompt.name`` → group, for the kept groups of this rank.
    """

    groups: dict[str, Group]

    def remember(self, taken: TrainingBatch, advantages: np.ndarray) -> None:
        """Choose groups of a trained batch to keep. ``advantages``: [S], from rewards alone and without noise."""
        ...

    def metrics(self) -> dict[str, float]: ...

    def state(self) -> dict: ...

    def load_state(self, state: Mapping, groups: Mapping[str, Group]) -> None: ...


class HandOut(Protocol):
    """Decides how many groups a rollout starts, and which of them are trained with it.

    late: the number of rollouts by which a group may be trained later than its own rollout.
    left: the job of the groups that the latest taken rollout left under way; None if there are
        none.
    """

    late: int
    left: RolloutJob | None

    def num_to_start(self, jobs: Collection[RolloutJob], number: int, *, is_last: bool) -> int:
        """Return the number of groups that a rollout starts. Not a collective.

        jobs: the rollouts that are started and not yet taken for training.
        number: this rollout's position among the rollouts that are not yet taken, from 1.
        is_last: whether this is the last rollout.
        """
        ...

    def has_groups(self, jobs: Collection[RolloutJob], number: int) -> bool:
        """Return whether started groups are left for one more rollout. Not a collective.

        jobs, number: as for ``num_to_start``. Groups are left if more are started than the
            ``number`` − 1 rollouts before it train.
        """
        ...

    def take(self, job: RolloutJob) -> RolloutJob:
        """Return the job of the groups that are trained now. A collective. ``job``: the rollout's own job."""
        ...

    def metrics(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupParts:
    """Holds a queue's parts. The filters are applied in their order (groups/build.py)."""

    order: StartOrder
    reroll: Reroll
    replay: Replay
    hand_out: HandOut
    filters: Sequence[GroupFilter] = ()


class AsDrawn:
    """Starts groups in the order of their places."""

    def arrange(self, prompts: Mapping[int, Prompt]) -> dict[int, Prompt]:
        return dict(sorted(prompts.items()))

    def note(self, prompts: Mapping[int, Prompt], facts: BatchFacts) -> None: ...

    def state(self) -> dict[str, int]:
        return {}

    def load_state(self, lengths: Mapping[str, int]) -> None: ...


class NoReroll:
    """Samples no prompt again. Waiting prompts of a checkpoint are kept for the next checkpoint."""

    def __init__(self) -> None:
        self._state = {"waiting": [], "num_buffered": 0, "num_issued": 0}

    def take(self, fraction: float, room: int) -> list[tuple[str, int]]:
        return []

    def note(self, scored: ScoredBatch, prompts: Mapping[int, Prompt], fresh: Collection[int]) -> None: ...

    def metrics(self) -> dict[str, float]:
        waiting, buffered, issued = self._state["waiting"], self._state["num_buffered"], self._state["num_issued"]
        return {
            "reroll/size": float(len(waiting)),
            "reroll/buffered": float(buffered),
            "reroll/issued": float(issued),
        }

    def state(self) -> dict:
        return dict(self._state)

    def load_state(self, state: Mapping) -> None:
        self._state = dict(state)


class NoReplay:
    """Keeps no group. The kept groups of a checkpoint are dropped."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}

    def remember(self, taken: TrainingBatch, advantages: np.ndarray) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {"replay/size": 0.0}

    def state(self) -> dict:
        return {"entries": []}

    def load_state(self, state: Mapping, groups: Mapping[str, Group]) -> None: ...


class WholeRollouts:
    """Trains every group with its own rollout."""

    late, left = 0, None

    def __init__(self, prompts_per_rollout: int) -> None:
        self._prompts_per_rollout = prompts_per_rollout

    def num_to_start(self, jobs: Collection[RolloutJob], number: int, *, is_last: bool) -> int:
        return self._prompts_per_rollout

    def has_groups(self, jobs: Collection[RolloutJob], number: int) -> bool:
        return False

    def take(self, job: RolloutJob) -> RolloutJob:
        return job

    def metrics(self) -> dict[str, float]:
        return {}

"""The interfaces of the objects that choose a rollout's groups, and default classes for a run without such choices.

A group is all samples of one prompt. It has a number in its rollout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_rl.rollout.groups.selection import Selection
from megatron_rl.rollout.job import Group, RolloutJob
from megatron_rl.rollout.scored_batch import ScoredBatch
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.types import BatchFacts, Prompt


class GroupFilter(Protocol):
    """Replaces groups without signal (all advantages 0) by other groups, before a rollout is trained."""

    def fill(self, index: int, selection: Selection) -> Selection:
        """Return the selection in which other groups replace the groups without signal. A collective.

        The other groups are sampled for this purpose, or kept from earlier rollouts. A group
        without signal stays if there is none to replace it.

        index: the rollout's index in the run.
        """
        ...


class StartOrder(Protocol):
    """Decides the order in which a rollout starts its groups. Its methods are not collectives."""

    def arrange(self, prompts: Mapping[int, Prompt]) -> dict[int, Prompt]: ...

    def note(self, prompts: Mapping[int, Prompt], facts: BatchFacts) -> None:
        """Record facts of a rollout's scored groups, such as response lengths, for the order of later rollouts.

        prompts: a group's number in the rollout → its prompt, for the groups of all ranks.
        facts: the samples' lengths, and in ``facts.groups`` the number of each sample's group.
        """
        ...

    def state(self) -> dict[str, int]: ...

    def load_state(self, lengths: Mapping[str, int]) -> None: ...


class GroupSizes(Protocol):
    """Decides how many samples each prompt of a rollout gets. Its methods are not collectives."""

    def deal(self, prompts: Mapping[int, Prompt]) -> dict[int, int]:
        """Return a group's number in the rollout → its number of samples.

        The decision may use earlier groups alone, never a sample of the groups that it is for.

        prompts: a group's number in the rollout → its prompt, for the groups of all ranks.
        """
        ...

    def note(self, prompts: Mapping[int, Prompt], scored: ScoredBatch) -> None:
        """Record the rewards of a rollout's scored groups. The arguments are as in ``Reroll.note``."""
        ...

    def metrics(self, facts: BatchFacts) -> dict[str, float]:
        """Return metric name → value for the groups of a rollout."""
        ...

    def state(self) -> dict: ...

    def load_state(self, state: Mapping) -> None: ...


class Reroll(Protocol):
    """Chooses prompts that a later rollout samples again. Its methods are not collectives."""

    def take(self, fraction: float, room: int) -> list[tuple[str, int]]:
        """Return (prompt_id, attempt) of the prompts that the next rollout samples again.

        A prompt's attempt is how many of its groups had no reward above ``reroll.fail_threshold``.

        fraction: the fraction of the training that is done, 0 to 1.
        room: the maximum number of prompts to return.
        """
        ...

    def note(self, scored: ScoredBatch, prompts: Mapping[int, Prompt], fresh: Collection[int]) -> None:
        """Record which prompts of a rollout's scored groups are to be sampled again, because the group failed.

        prompts: a group's number in the rollout → its prompt, for the groups of all ranks.
        fresh: the numbers of the groups whose weights are at most
            ``rollout.producer.max_staleness_steps`` steps old. No other group is recorded.
        """
        ...

    def metrics(self) -> dict[str, float]: ...

    def state(self) -> dict: ...

    def load_state(self, state: Mapping) -> None: ...


class Replay(Protocol):
    """Keeps groups that were trained, so that a later rollout can train them again. Its methods are not collectives.

    groups: ``Prompt.name`` → group, for the kept groups of this rank.
    """

    groups: dict[str, Group]

    def remember(self, taken: TrainingBatch, advantages: np.ndarray) -> None:
        """Choose the groups of a trained batch that are kept for replay.

        advantages: [S], one per sample, computed from rewards alone, without the noise of
            ``advantage.noise_std``.
        """
        ...

    def metrics(self) -> dict[str, float]: ...

    def state(self) -> dict: ...

    def load_state(self, state: Mapping, groups: Mapping[str, Group]) -> None: ...


class HandOut(Protocol):
    """Decides how many groups a rollout starts, and which groups are trained with the rollout.

    late: by how many rollouts the training of a group may be delayed: 0 or 1.
    left: the job of the groups that the latest trained rollout left unfinished; None if it left
        none.
    """

    late: int
    left: RolloutJob | None

    def num_to_start(self, jobs: Collection[RolloutJob], number: int, *, is_last: bool) -> int:
        """Return the number of groups that a rollout starts. Not a collective.

        jobs: the jobs of the rollouts that are started and not yet taken for training.
        number: this rollout's position, from 1, among the rollouts not yet taken for training.
        is_last: whether this is the last rollout of the run.
        """
        ...

    def has_groups(self, jobs: Collection[RolloutJob], number: int) -> bool:
        """Return whether the rollouts before this one start more groups than they train. Not a collective.

        If so, this rollout can train the others.

        jobs: the jobs of the rollouts that are started and not yet taken for training.
        number: this rollout's position, from 1, among the rollouts not yet taken for training.
        """
        ...

    def take(self, job: RolloutJob) -> RolloutJob:
        """Return a job with the groups to train now. A collective.

        Some of them may come from the previous rollout, and some of this rollout's groups may be
        left for the next.

        job: the job that this rollout started.
        """
        ...

    def metrics(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupParts:
    """Holds the objects that choose the groups of a run's rollouts. ``filters`` are applied in their order."""

    order: StartOrder
    sizes: GroupSizes
    reroll: Reroll
    replay: Replay
    hand_out: HandOut
    filters: Sequence[GroupFilter] = ()


class AsDrawn:
    """Starts a rollout's groups in ascending order of their numbers, the order ``rollout.start_order=drawn``."""

    def arrange(self, prompts: Mapping[int, Prompt]) -> dict[int, Prompt]:
        return dict(sorted(prompts.items()))

    def note(self, prompts: Mapping[int, Prompt], facts: BatchFacts) -> None: ...

    def state(self) -> dict[str, int]:
        return {}

    def load_state(self, lengths: Mapping[str, int]) -> None: ...


class FixedSizes:
    """Gives every prompt ``samples_per_prompt`` samples, the setting ``rollout.group_sizes=fixed``."""

    def __init__(self, samples_per_prompt: int) -> None:
        self._samples_per_prompt = samples_per_prompt

    def deal(self, prompts: Mapping[int, Prompt]) -> dict[int, int]:
        return dict.fromkeys(prompts, self._samples_per_prompt)

    def note(self, prompts: Mapping[int, Prompt], scored: ScoredBatch) -> None: ...

    def metrics(self, facts: BatchFacts) -> dict[str, float]:
        return {}

    def state(self) -> dict:
        return {}

    def load_state(self, state: Mapping) -> None: ...


class NoReroll:
    """Samples no prompt again. Prompts that a checkpoint holds for re-roll are copied to the next checkpoint."""

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
    """Keeps no group for replay, and drops the groups that a checkpoint holds for replay."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}

    def remember(self, taken: TrainingBatch, advantages: np.ndarray) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {"replay/size": 0.0}

    def state(self) -> dict:
        return {"entries": []}

    def load_state(self, state: Mapping, groups: Mapping[str, Group]) -> None: ...


class WholeRollouts:
    """Lets each rollout train exactly the groups that it starts.

    It is the ``HandOut`` (choice of the groups to start and to train) of a run whose rollouts leave
    no group unfinished.
    """

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

"""Replay: the groups with the highest scores (``group_scores``) are kept, and replace later groups without signal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.config import ReplayConfig
from megatron_rl.observability.timer import StepTimer
from megatron_rl.rollout.groups.replay_buffer import Entry, ReplayBuffer, group_scores
from megatron_rl.rollout.groups.selection import Selection
from megatron_rl.rollout.job import Group
from megatron_rl.rollout.scored_batch import GroupScorer
from megatron_rl.rollout.training_batch import TrainingBatch


class GroupReplay:
    """Keeps trained groups, and puts them in place of later groups without signal (all advantages 0).

    Every rank has the same buffer of scores. A group itself is kept only on the rank that holds its
    samples.
    """

    def __init__(
        self, config: ReplayConfig, seed: int, *, backend: MegatronBackend, scorer: GroupScorer, timer: StepTimer
    ) -> None:
        self.backend, self.scorer, self.timer = backend, scorer, timer
        self.buffer = ReplayBuffer(config, seed)
        self.groups: dict[str, Group] = {}  # Prompt.name → group, for this rank's groups

    def fill(self, index: int, selection: Selection) -> Selection:
        """Return the selection with replayed groups instead of groups without signal. A collective.

        index: the rollout's index, from which the random draw of groups is derived.
        """
        version = self.backend.weight_version
        self._forget(self.buffer.expire(version))
        names = [prompt.name for prompt in selection.prompts.values()]
        keys = self.buffer.draw(len(selection.dead), rollout=index, exclude=names)
        metrics = {"replay/replaced": float(len(keys))}
        if not keys:
            return selection.measured(metrics)
        versions = {entry.key: entry.version for entry in self.buffer.entries}
        metrics["replay/age_max"] = float(version - min(versions[key] for key in keys))
        key_at = dict(zip(selection.dead, keys, strict=False))
        groups = {number: self.groups[key] for number, key in key_at.items() if key in self.groups}
        with self.timer.measure("reward"):
            scored = self.scorer.join([selection.scored, self.scorer.gather(groups)], list(selection.prompts))
        return selection.replay(key_at, groups, scored).measured(metrics)

    def remember(self, taken: TrainingBatch, advantages: np.ndarray) -> None:
        """Keep the groups with the highest scores (``group_scores``), of the batch and of those kept before.

        Not a collective. Groups that were replayed ``replay.max_uses`` times are dropped.

        advantages: [S], one per sample, computed from rewards alone, without the noise of
            ``advantage.noise_std``.
        """
        facts, scored = taken.facts, taken.scored
        replayed = set(facts.groups[taken.replayed].tolist())
        scores = group_scores(advantages, facts.groups, scored.rewards.included, scored.by_function)
        entries = []
        for number, score in zip(*scores, strict=True):
            if number not in replayed:  # the buffer drops scores of 0
                version = int(facts.weight_versions[facts.groups == number].min())
                entries.append(Entry(key=taken.prompts[int(number)].name, score=float(score), version=version))
        self._forget(self.buffer.retire())
        gone = self.buffer.add(entries)
        own = {taken.prompts[number].name: group for number, group in taken.groups.items() if number not in replayed}
        self.groups |= own
        keys = {entry.key for entry in self.buffer.entries}
        self._forget([*gone, *(name for name in list(self.groups) if name not in keys)])

    def _forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.groups.pop(key, None)

    def metrics(self) -> dict[str, float]:
        return {"replay/size": float(len(self.buffer))}

    def state(self) -> dict:
        return self.buffer.state()

    def load_state(self, state: Mapping, groups: Mapping[str, Group]) -> None:
        """Restore the buffer of scores, and this rank's groups, from a checkpoint.

        Groups beyond this run's ``replay.capacity_groups`` are dropped.

        state: what ``state`` returned.
        groups: ``Prompt.name`` → group, for the saved groups of this rank.
        """
        gone = self.buffer.load_state(state)
        self.groups = {name: group for name, group in groups.items() if name not in gone}

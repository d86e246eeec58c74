"""What is used again: groups that were trained (replay) and prompts that failed (re-roll)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.checks import at_least


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Groups with the most signal are kept, and stand in for groups that have none.

    ``capacity_groups``: groups kept; 0: none. ``max_age_versions``: weight versions between a group's oldest token and
    the step that trains it again; null: no limit. ``max_uses``: how often one is replayed. ``recompute_logprobs``:
    their old log-probs and importance weights are those of the current policy; false: the engine's log-probs of that
    time are their old ones.
    """

    capacity_groups: int = 0
    max_age_versions: int | None = 16
    max_uses: int = 1
    recompute_logprobs: bool = True

    def __post_init__(self) -> None:
        at_least("replay.capacity_groups", self.capacity_groups, 0)
        at_least("replay.max_age_versions", self.max_age_versions, 1)
        at_least("replay.max_uses", self.max_uses, 1)


@dataclass(frozen=True, kw_only=True)
class RerollConfig:
    """Prompts whose whole group failed, every reward at most ``fail_threshold``, are asked again later.

    ``max_groups``: of a rollout, at most; 0: never. ``start_fraction``: of training, before which none is asked again.
    ``capacity_prompts``: prompts that wait; when it is full the one that waited longest leaves. ``max_attempts``: how
        often a prompt is asked again.
    """

    max_groups: int = 0
    start_fraction: float = 0.5
    fail_threshold: float = 0.0
    capacity_prompts: int = 1024
    max_attempts: int = 1

    def __post_init__(self) -> None:
        at_least("reroll.max_groups", self.max_groups, 0)
        at_least("reroll.start_fraction", self.start_fraction, 0.0)
        at_least("reroll.capacity_prompts", self.capacity_prompts, 1)
        at_least("reroll.max_attempts", self.max_attempts, 1)

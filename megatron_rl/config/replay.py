"""The sections of things used twice: groups that were trained (replay) and prompts that failed (re-roll)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.checks import at_least


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Keeps trained groups with the most signal, which stand in for groups without signal (docs/async.md)."""

    capacity_groups: int = 0
    """Groups kept, those with the most signal: Σ|A| · Σ_f std of reward function f; 0: none."""
    max_age_versions: int | None = 16
    """Weight versions between a group's oldest token and the step that trains it again; null: no limit."""
    max_uses: int = 1
    """Number of times that a group is replayed."""
    recompute_logprobs: bool = True
    """true: π_old and the weights π_old/μ are the current policy's; false: π_old is the engine's at sampling time."""

    def __post_init__(self) -> None:
        at_least("replay.capacity_groups", self.capacity_groups, 0)
        at_least("replay.max_age_versions", self.max_age_versions, 1)
        at_least("replay.max_uses", self.max_uses, 1)


@dataclass(frozen=True, kw_only=True)
class RerollConfig:
    """Asks prompts again whose whole group failed: every reward was at most `reroll.fail_threshold`."""

    max_groups: int = 0
    """Prompts that are asked again in one rollout at most; 0: never."""
    start_fraction: float = 0.5
    """Share of training before which no prompt is asked again."""
    fail_threshold: float = 0.0
    """A group failed where every reward is at most this."""
    capacity_prompts: int = 1024
    """Prompts that wait at most; when more fail, the one that waited longest leaves."""
    max_attempts: int = 1
    """Number of times that a prompt is asked again."""

    def __post_init__(self) -> None:
        at_least("reroll.max_groups", self.max_groups, 0)
        at_least("reroll.start_fraction", self.start_fraction, 0.0)
        at_least("reroll.capacity_prompts", self.capacity_prompts, 1)
        at_least("reroll.max_attempts", self.max_attempts, 1)

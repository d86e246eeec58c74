"""The sections of things used twice: groups that were trained (replay) and prompts that failed (re-roll)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.ranges import Range


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Keeps trained groups with the most signal, which stand in for groups without signal (docs/async.md)."""

    capacity_groups: Annotated[int, Range(0, 10**6)] = 0
    """Groups kept, those with the most signal: Σ|A| · Σ_f std of reward function f; 0: none."""
    max_age_versions: Annotated[int, Range(1)] | None = 16
    """Weight versions between a group's oldest token and the step that trains it again; null: no limit."""
    max_uses: Annotated[int, Range(1)] = 1
    """Number of times that a group is replayed."""
    recompute_logprobs: bool = True
    """true: π_old and the weights π_old/μ are the current policy's; false: π_old is the engine's at sampling time."""


@dataclass(frozen=True, kw_only=True)
class RerollConfig:
    """Asks prompts again whose whole group failed: every reward was at most `reroll.fail_threshold`."""

    max_groups: Annotated[int, Range(0, 10**6)] = 0
    """Prompts that are asked again in one rollout at most; 0: never."""
    start_fraction: Annotated[float, Range(0, 1)] = 0.5
    """Share of training before which no prompt is asked again."""
    fail_threshold: Annotated[float, Range(-(10**9))] = 0.0
    """A group failed where every reward is at most this."""
    capacity_prompts: Annotated[int, Range(1)] = 1024
    """Prompts that wait at most; when more fail, the one that waited longest leaves."""
    max_attempts: Annotated[int, Range(1)] = 1
    """Number of times that a prompt is asked again."""

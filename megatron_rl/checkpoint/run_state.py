"""The state of a run in a checkpoint, beside model, critic and random states: as taken, as found, as restored."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl.storage.remote import RemotePath

# Files of the run's folder; a resume cuts them to the sizes that they had when the checkpoint was taken.
APPENDED = ("metrics.jsonl", "trace.jsonl", "completions.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Names a verified checkpoint to resume from. ``state``: its state.json."""

    folder: pathlib.Path | RemotePath
    state: Mapping

    @property
    def rollouts(self) -> int:
        return self.state["rollouts"]

    @property
    def supervised_steps(self) -> int | None:
        """Return the supervised steps taken, if the checkpoint lies within the supervised start; else None."""
        return self.state.get("supervised_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Holds all that a checkpoint keeps of a run beside model, critic and random states.

    queue:             the rollout queue's state that is the same on every rank.
    queue_rows:        this rank's own bytes of the rollout queue.
    prompts, reference, metrics: JSON-able states of the data set's cursor, the reference policy and
        the metrics.
    trace_rollouts:    the number of rollouts in trace.jsonl.
    """

    queue: Mapping
    queue_rows: bytes
    prompts: Mapping
    reference: Mapping
    metrics: Mapping
    trace_rollouts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredRun:
    """Holds a run's state from a checkpoint; fields not named here are RunState's.

    rollouts: the number trained so far; None within the supervised start.
    supervised_steps: the supervised steps taken; None after the supervised start.
    queue_rows: the bytes of one or several ranks of the saved run.
    """

    rollouts: int | None
    supervised_steps: int | None
    queue: Mapping
    queue_rows: Sequence[bytes]
    prompts: Mapping
    reference: Mapping
    trace_rollouts: int


def own_file(rank: int) -> str:
    return f"rollouts_{rank}.npz"


def changed_settings(before: Mapping, now: Mapping, prefix: str = "") -> dict[str, tuple]:
    """Return the dotted keys whose values differ, with both values."""
    changes: dict[str, tuple] = {}
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes |= changed_settings(old, new, f"{prefix}{key}.")
        elif old != new:
            changes[prefix + key] = (old, new)
    return changes

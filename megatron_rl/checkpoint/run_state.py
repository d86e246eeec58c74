"""The records of a run's state that is no tensor: RunState is saved in a checkpoint, RestoredRun is read from it."""

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
    """Holds a verified checkpoint to resume from: its folder, and ``state``, the content of its state.json."""

    folder: pathlib.Path | RemotePath
    state: Mapping

    @property
    def rollouts(self) -> int:
        return self.state["rollouts"]

    @property
    def supervised_steps(self) -> int | None:
        """Return the number of supervised steps taken, if the checkpoint is from the supervised start; else None.

        The supervised start is the fine-tuning before the first rollout.
        """
        return self.state.get("supervised_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Holds what a checkpoint keeps of a run, apart from the model, the critic and the random states.

    queue: the part of the rollout queue's state that is the same on every rank.
    queue_rows: the content of this rank's ``rollouts_<rank>.npz``: rollouts that are not trained
        yet, and those kept to be trained again (replay).
    prompts, reference, metrics: JSON-able states of the data set's cursor, the reference policy and
        the metrics.
    trace_rollouts: the number of rollouts in trace.jsonl.
    """

    queue: Mapping
    queue_rows: bytes
    prompts: Mapping
    reference: Mapping
    metrics: Mapping
    trace_rollouts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredRun:
    """Holds a run's state restored from a checkpoint. Fields that are not listed here have RunState's meaning.

    rollouts: the number of rollouts trained so far; None within the supervised start, before the
        first rollout.
    supervised_steps: the number of supervised steps taken; None after the supervised start.
    queue_rows: the contents of the checkpoint's ``rollouts_<rank>.npz`` files that this rank reads.
        There are several if more ranks saved the checkpoint than now read it.
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
    """Return {dotted key: (value before, value now)} of the settings that differ; a missing value is None.

    prefix: the dotted path of both mappings within the whole configuration, with a final dot.
    """
    changes: dict[str, tuple] = {}
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes |= changed_settings(old, new, f"{prefix}{key}.")
        elif old != new:
            changes[prefix + key] = (old, new)
    return changes

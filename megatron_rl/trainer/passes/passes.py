"""The passes that a rollout's advantages are made of, and the container of their results."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_rl.backend.batch import Batch
from megatron_rl.backend.part import Recorded
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.types import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OldLogProbs:
    """Holds log π_old of a rollout, and its gap to the engine's log-probs.

    flat:    float32 [T] over response tokens; 0 for a sample that was not passed.
    own:     the optimizer step that takes its own log-probs, detached, as log π_old. Its samples
             need no pass. None if there is no such step.
    sums:    sums of the gap over the passed samples. The sums of the ``own`` step join them once
             that step has run.
    metrics: the metrics of the pass.
    recorded: each backend part's records of the pass (backend/part.py), which the updates read.
    """

    flat: np.ndarray
    own: StepPlan | None
    sums: Mapping[str, float]
    metrics: Mapping[str, float]
    recorded: tuple[Recorded, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Passes:
    """Holds the results of the passes over every sample of a rollout; None for a result that is not needed.

    loss_mask: bool [T] flat over response tokens, the tokens that carry loss.
    old:       log π_old.
    reference: float32 [T], log π_ref.
    teacher:   float32 [T], log π_T.
    values:    float32 [T], the critic's values.

    Example: PPO with a KL in the reward has all but ``teacher``; GRPO has none.
    """

    loss_mask: np.ndarray | None = None
    old: OldLogProbs | None = None
    reference: np.ndarray | None = None
    teacher: np.ndarray | None = None
    values: np.ndarray | None = None


class Pass(Protocol):
    """Computes fields of ``Passes`` for every sample of a rollout, such as ``reference``. A collective."""

    def __call__(self, taken: TrainingBatch, index: int) -> Mapping[str, object]:
        """Return fields of ``Passes`` by their names, for rollout ``index``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PassesOfAdvantages:
    """Makes the passes that a run's advantages need, one after the other; GRPO needs none."""

    passes: Sequence[Pass] = ()

    def before_advantages(self, taken: TrainingBatch, index: int) -> Passes:
        """Return the results of the passes over rollout ``index``. A collective if there is a pass."""
        result = Passes()
        for each in self.passes:
            result = dataclasses.replace(result, **each(taken, index))
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatPass:
    """Gives one field of ``Passes`` by a function of the batch: log-probs under other weights, values, the loss mask.

    enter: returns the context that names and times the pass.
    """

    name: str
    compute: Callable[[Batch], np.ndarray]
    enter: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def __call__(self, taken: TrainingBatch, index: int) -> Mapping[str, object]:
        """Return the field, float32 or bool [T] flat over response tokens. A collective."""
        with self.enter():
            return {self.name: self.compute(taken.batch)}

"""The forward passes that run before a rollout's advantages, and the dataclasses of their results."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_rl.algorithm.repeats import given_to_repeats
from megatron_rl.backend.batch import Batch
from megatron_rl.backend.part import Recorded
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.types import BatchFacts, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OldLogProbs:
    """Holds log π_old of a rollout, and its gap to the engine's log-probs.

    flat:     float32 [T], one number for each response token, sample after sample; 0 for a sample
              that was in no pass.
    own:      the optimizer step that takes its own log-probs, detached, as log π_old. Its samples
              need no pass. None if there is no such step.
    sums:     sums of the gap over the samples that were in a pass, with the keys of
              ``LogProbs.sums``. The sums of the ``own`` step are added once that step has run.
    metrics:  the metrics of the pass.
    recorded: the data that optional features (backend/part.py) recorded in the pass, such as routed
              experts. The optimizer steps read it.
    """

    flat: np.ndarray
    own: StepPlan | None
    sums: Mapping[str, float]
    metrics: Mapping[str, float]
    recorded: tuple[Recorded, ...] = ()

    def of_repeats(self, stand_in: np.ndarray | None, facts: BatchFacts) -> OldLogProbs:
        """Return these log-probs, where each sample has those of the one that stands in for it.

        stand_in: the result of ``stand_ins`` (algorithm/repeats.py); None: each is its own.
        """
        if stand_in is None:
            return self
        return dataclasses.replace(self, flat=given_to_repeats(self.flat, stand_in, facts))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Passes:
    """Holds the results of the forward passes over every sample of a rollout; None for a result that is not needed.

    Each array has one value for each response token of the rollout, sample after sample.

    loss_mask: bool [T], the tokens that carry loss; None if no pass runs.
    old:       log π_old.
    reference: float32 [T], log π_ref.
    teacher:   float32 [T], log π_T.
    values:    float32 [T], the critic's values.

    Example: PPO with a KL in the reward has all but ``teacher``; GRPO's
    advantages are made of rewards alone, so it runs no pass and all are None.
    """

    loss_mask: np.ndarray | None = None
    old: OldLogProbs | None = None
    reference: np.ndarray | None = None
    teacher: np.ndarray | None = None
    values: np.ndarray | None = None


class Pass(Protocol):
    """Computes one or more fields of ``Passes``, such as ``reference``, for every sample of a rollout. A collective."""

    def __call__(self, taken: TrainingBatch, index: int) -> Mapping[str, object]:
        """Return {field of ``Passes``: result} for the rollout ``taken``, whose index in the run is ``index``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PassesOfAdvantages:
    """Runs the forward passes that a run's advantages need, one after the other; GRPO needs none."""

    passes: Sequence[Pass] = ()

    def before_advantages(self, taken: TrainingBatch, index: int) -> Passes:
        """Run the forward passes over rollout ``index`` and return their results. A collective if there are any."""
        result = Passes()
        for each in self.passes:
            result = dataclasses.replace(result, **each(taken, index))
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatPass:
    """Computes one field of ``Passes`` from the batch: log-probs under other weights, values or the loss mask.

    name: the field's name.
    compute: takes the batch, returns the field's array [T].
    enter: a function that returns a context, in which the pass runs and is timed.
    """

    name: str
    compute: Callable[[Batch], np.ndarray]
    enter: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def __call__(self, taken: TrainingBatch, index: int) -> Mapping[str, object]:
        """Return {``self.name``: its array} for the rollout ``taken``. A collective.

        The array is float32 or bool [T] over response tokens. ``index`` is not read.
        """
        with self.enter():
            return {self.name: self.compute(taken.batch)}

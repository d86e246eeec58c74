"""The check of passes and steps against the engine's log-probs: a guarded gap, or equality (bitwise.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from megatron_rl.config import RolloutConfig
from megatron_rl.observability.metrics import GAPS, add_sums, divide
from megatron_rl.rollout.logprob_gap import guard_logprob_gap
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.trainer.passes.passes import OldLogProbs
from megatron_rl.types import StepPlan, StepResult


class GapCheck(Protocol):
    """Compares the trainer's log-probs with the engine's, and raises EngineError if they are too far apart."""

    def of_pass(self, sums: Mapping[str, float], *, fresh: bool) -> dict[str, float]:
        """Return the metrics of the gap that a pass has measured. Not a collective.

        sums: over all ranks. fresh: whether engine and trainer had the same weights.
        """
        ...

    def of_rollout(self, taken: TrainingBatch, old: OldLogProbs) -> dict[str, float]:
        """Return the metrics of comparing a rollout token by token. A collective if it is compared so."""
        ...

    def of_step(
        self, old: OldLogProbs, step: StepPlan, result: StepResult, *, number: int, fresh: bool
    ) -> dict[str, float]:
        """Return the gap's metrics of the rollout's ``number``-th step; {} if it has none. Not a collective."""
        ...


class GapGuard:
    """Guards the mean gap by ``rollout.max_logprob_gap`` and ``rollout.warn_logprob_gap``."""

    def __init__(self, rollout: RolloutConfig, dtype: str) -> None:
        """dtype: ``model.dtype``."""
        self.rollout, self.dtype = rollout, dtype

    def of_pass(self, sums: Mapping[str, float], *, fresh: bool) -> dict[str, float]:
        guard_logprob_gap(sums, self.rollout, self.dtype, fresh=fresh)
        return divide({name: sums[name] for name in ("tokens", *GAPS) if name in sums})

    def of_rollout(self, taken: TrainingBatch, old: OldLogProbs) -> dict[str, float]:
        return {}

    def of_step(
        self, old: OldLogProbs, step: StepPlan, result: StepResult, *, number: int, fresh: bool
    ) -> dict[str, float]:
        """Return the metrics of a rollout whose step has measured the gap itself, since no pass preceded it."""
        if step is not old.own:
            return {}
        measured = {name: result.sums[name] for name in ("tokens", *GAPS)}
        return self.of_pass(add_sums(old.sums, measured), fresh=fresh)

"""The check of ``rollout.bitwise``: log π_old and the first step's log-probs equal the engine's."""

from __future__ import annotations

from megatron_rl.algorithm.bitwise import require_equal
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.config import RolloutConfig
from megatron_rl.errors import EngineError
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.trainer.passes.gap_check import GapGuard
from megatron_rl.trainer.passes.passes import OldLogProbs
from megatron_rl.types import StepPlan, StepResult

GAP = "train/logprob_gap_max"


class BitwiseCheck(GapGuard):
    """Compares every token of a rollout; each row of its steps has the metric of the gap, which is 0."""

    def __init__(self, rollout: RolloutConfig, dtype: str, backend: MegatronBackend) -> None:
        super().__init__(rollout, dtype)
        self.backend, self.gap = backend, 0.0

    def of_rollout(self, taken: TrainingBatch, old: OldLogProbs) -> dict[str, float]:
        """Return the metric of a rollout whose every log π_old equals the engine's log-prob. A collective.

        Raises EngineError on every rank alike, naming the first sample and position that differ.
        """
        if not taken.is_fresh:
            raise EngineError(
                f"rollout.bitwise=true compares tokens of weight version {taken.trained_version}, and a sample of this "
                "rollout has others"
            )
        facts = taken.facts
        engine, mask = self.backend.gather_rollout_logprobs(taken.batch), self.backend.gather_loss_mask(taken.batch)
        self.gap = require_equal(old.flat, engine, mask, facts.response_tokens, facts.sample_ids)
        return {GAP: self.gap}

    def of_step(
        self, old: OldLogProbs, step: StepPlan, result: StepResult, *, number: int, fresh: bool
    ) -> dict[str, float]:
        """Return the rollout's gap; raise EngineError if the first step's log-probs differ from the engine's."""
        if number == 0:
            compare_update(result)
        return {GAP: self.gap}


def compare_update(result: StepResult) -> None:
    """Raise EngineError if the first optimizer step's log-probs differ from the engine's.

    The step's forward pass computes a gradient, and its packing differs from the pass for log
    π_old. result: its sums are over all ranks.
    """
    gap = result.sums.get("logprob_gap_max", 0.0)
    if gap != 0.0:
        raise EngineError(
            f"rollout.bitwise=true: the update's own log-probs are up to {gap:.3g} nats from the engine's, and those "
            "of the pass before it are equal: the two passes differ. Set rollout.bitwise=false"
        )

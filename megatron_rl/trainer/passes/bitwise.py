"""The check under ``rollout.bitwise=true``: the trainer's log-probs must equal the engine's in every bit."""

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
    """Checks that the trainer's log-prob of every loss token equals the engine's; else raises EngineError.

    The largest difference is a metric in every optimizer step's row of metrics.jsonl; it is 0
    whenever the check has passed.
    """

    def __init__(self, rollout: RolloutConfig, dtype: str, backend: MegatronBackend) -> None:
        super().__init__(rollout, dtype)
        self.backend, self.gap = backend, 0.0

    def of_rollout(self, taken: TrainingBatch, old: OldLogProbs) -> dict[str, float]:
        """Raise EngineError unless a rollout's log π_old equals the engine's log-probs bit by bit; return a metric.

        A collective. The metric is the largest difference, which is 0. Every rank raises alike. The
        error names the first sample and position that differ. If older weights sampled some tokens,
        nothing is compared, and the error says so.

        taken, old: the rollout's batch, and its log π_old.
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
        """Return the largest difference that ``of_rollout`` found, as a metric; check step 0's own log-probs, too.

        Raises EngineError if step 0's own forward pass gives other log-probs than the engine's.

        result: the step's result.
        number: the step's number within the rollout, from 0.
        old, step, fresh: not used here.
        """
        if number == 0:
            compare_update(result)
        return {GAP: self.gap}


def compare_update(result: StepResult) -> None:
    """Raise EngineError if the first optimizer step's log-probs differ from the engine's.

    The step's forward pass keeps a graph for the gradient, and packs samples otherwise than the
    pass for log π_old. So equal log-probs in that pass do not suffice.

    result: the step's result, whose sums are over all ranks.
    """
    gap = result.sums.get("logprob_gap_max", 0.0)
    if gap != 0.0:
        raise EngineError(
            f"rollout.bitwise=true: the update's own log-probs are up to {gap:.3g} nats from the engine's, and those "
            "of the pass before it are equal: the two passes differ. Set rollout.bitwise=false"
        )

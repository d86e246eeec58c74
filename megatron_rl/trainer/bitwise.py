"""``rollout.bitwise`` in a run: which settings it can be had under, and the comparison of every rollout."""

from __future__ import annotations

import numpy as np

from megatron_rl.algorithm.bitwise import require_equal
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.errors import EngineError
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.types import StepResult

GAP = "train/logprob_gap_max"


def compare_rollout(backend: MegatronBackend, taken: TrainingBatch, old: np.ndarray) -> dict[str, float]:
    """Return the metric of a rollout whose log π_old (float32 [T] flat, of every sample) equal the engine's log-probs.

    A collective. Raises EngineError, on every rank alike, naming the first sample and position that differ.
    """
    if not taken.is_fresh:
        raise EngineError(
            f"rollout.bitwise=true compares tokens of weight version {taken.trained_version}, and a sample of this "
            "rollout has others"
        )
    facts = taken.facts
    engine, mask = backend.gather_rollout_logprobs(taken.batch), backend.gather_loss_mask(taken.batch)
    return {GAP: require_equal(old, engine, mask, facts.response_tokens, facts.sample_ids)}


def compare_update(result: StepResult) -> None:
    """Raise EngineError where the first optimizer step of a rollout computed other log-probs than the engine's.

    Its forward pass has a gradient and packs by another plan than that of log π_old. result: with sums over all ranks.
    """
    gap = result.sums.get("logprob_gap_max", 0.0)
    if gap != 0.0:
        raise EngineError(
            f"rollout.bitwise=true: the update's own log-probs are up to {gap:.3g} nats from the engine's, and those "
            "of the pass before it are equal: the two passes differ. Set rollout.bitwise=false"
        )

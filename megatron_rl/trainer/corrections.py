"""What needs log-probs to be decided: importance weights, and which samples they leave with signal. Semantics §5 and
§7.

After the log-prob pass, before the training plan. Every rank holds the same log-probs, advantages and masks; rank 0's
weights are everyone's all the same, so that no rounding of another CPU can cut another plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.algorithm.importance import correction_metrics, importance_weights
from megatron_rl.algorithm.signal import has_signal
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.config import CorrectionConfig
from megatron_rl.distributed import collectives
from megatron_rl.types import Advantages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CorrectedSignal:
    """weights: [T] float64, flat over response tokens, None where no correction is asked for (all 1) · signal: bool
    [S], what is left to train on · metrics: ``correction/*``."""

    weights: np.ndarray | None
    signal: np.ndarray
    metrics: Mapping[str, float] = field(default_factory=dict)


def apply_corrections(
    config: CorrectionConfig,
    backend: MegatronBackend,
    batch: Batch,
    *,
    advantages: Advantages,
    signal: np.ndarray,
    passed: np.ndarray,
    old_logprobs: np.ndarray | None,
    advantage_epsilon: float = 0.0,
) -> CorrectedSignal:
    """Once per rollout, for all its mini-batches and epochs. A collective where a correction is asked for.

    signal bool [S]: of those by advantage alone, what is to be trained · passed bool [S]: the samples whose
    old_logprobs [T] are known.
    """
    if not config.is_on:
        return CorrectedSignal(weights=None, signal=signal)
    assert old_logprobs is not None and not (signal & ~passed).any(), "signal without log-probs"
    lengths, engine, mask = (
        batch.facts.response_tokens,
        backend.gather_rollout_logprobs(batch),
        backend.gather_loss_mask(batch),
    )
    found = importance_weights(old_logprobs, engine, mask, lengths, advantages.of_sample, passed, config)
    weights = collectives.broadcast_from_rank0(found.weights)
    left = signal & has_signal(
        advantages.largest(lengths, weights), batch.facts.loss_tokens, advantage_epsilon=advantage_epsilon
    )
    metrics = {
        **correction_metrics(found, mask, lengths, signal),
        "correction/masked_samples": float((signal & ~left).sum()),
    }
    return CorrectedSignal(weights=weights, signal=left, metrics=metrics)

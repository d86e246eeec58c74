"""Importance weights from log-probs, and the samples that are still trained on under these weights.

docs/semantics.md §5 and §7. The weights are computed after the log-prob pass and before the final
plan of optimizer steps. Every rank computes them from the same numbers, but another CPU may round
differently. So every rank takes rank 0's weights, and all ranks make the same plan.
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
from megatron_rl.trainer.decision import Decision
from megatron_rl.types import Advantages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CorrectedSignal:
    """Holds the importance weights of a rollout, and the samples that are still trained on under them.

    weights: float64 [T], one weight for each response token, sample after sample. None if no
             correction is configured (all weights are 1).
    signal:  bool [S], the samples to train on: those with a token at which |weight · advantage| is
             larger than ``skip.advantage_epsilon``.
    metrics: ``correction/*``.
    """

    weights: np.ndarray | None
    signal: np.ndarray
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrections:
    """Computes the importance weights of a run's rollouts.

    settings: the section ``correction``.
    advantage_epsilon: ``skip.advantage_epsilon``. A sample is trained on if, at one of its tokens,
        |weight · advantage| is larger than this number.
    """

    settings: CorrectionConfig
    backend: MegatronBackend
    advantage_epsilon: float

    def __call__(self, batch: Batch, decision: Decision, advantages: Advantages, old: np.ndarray) -> CorrectedSignal:
        """Return a rollout's importance weights, and the samples that are left to train on. A collective.

        A sample is left out if |weight · advantage| is above ``advantage_epsilon`` at none of its
        tokens.

        decision: the choice by the advantages alone. ``trained`` are the samples to train on;
            ``passed`` are those that the plan runs, which may be more, and those that they stand for.
        old: [T], log π_old of each response token, sample after sample; known for samples in
            ``passed``.
        """
        return apply_corrections(
            self.settings,
            self.backend,
            batch,
            advantages=advantages,
            signal=decision.trained,
            passed=decision.passed,
            old_logprobs=old,
            advantage_epsilon=self.advantage_epsilon,
        )


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
    """Return a rollout's importance weights, and the samples that are still trained on under them.

    A sample stays if, at one of its tokens, |weight · advantage| is larger than
    ``advantage_epsilon``. The weights hold for all mini-batches and epochs of the rollout. A
    collective if a correction is configured.

    advantages: the rollout's advantages.
    signal: bool [S], the samples to train on by their advantages alone.
    passed: bool [S], the samples whose ``old_logprobs`` are known.
    old_logprobs: [T], log π_old of each response token, sample after sample.
    """
    if not config.is_on:
        return CorrectedSignal(weights=None, signal=signal)
    assert old_logprobs is not None and not (signal & ~passed).any(), "signal without log-probs"
    lengths, engine, mask = (
        batch.facts.response_tokens,
        backend.gather_rollout_logprobs(batch),
        backend.gather_loss_mask(batch),
    )
    importance = importance_weights(
        old_logprobs, engine, mask, lengths, advantages.of_sample, passed, config, sample_ids=batch.facts.sample_ids
    )
    weights = collectives.broadcast_from_rank0(importance.weights)
    left = signal & has_signal(
        advantages.largest(lengths, weights),
        batch.facts.loss_tokens,
        advantage_epsilon=advantage_epsilon,
        sample_ids=batch.facts.sample_ids,
        way_out=f"its importance weights are in it: look at correction.mode={config.mode}, correction.cap={config.cap}",
    )
    metrics = {
        **correction_metrics(importance, mask, lengths, signal),
        "correction/masked_samples": float((signal & ~left).sum()),
    }
    return CorrectedSignal(weights=weights, signal=left, metrics=metrics)

"""Computes an optimizer step's FLOPs over the device's peak, and its measured micro-batch costs. Not collectives."""

from __future__ import annotations

import numpy as np

from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.distributed.platform import HOST
from megatron_rl.model.flops import flops_per_token
from megatron_rl.planning.cost import plan_seconds
from megatron_rl.planning.plan import padded_lengths
from megatron_rl.types import BatchFacts, StepKind, StepPlan


def performance(model: TrainableModel, facts: BatchFacts, mini_batch: StepPlan, seconds: float) -> dict[str, float]:
    """Return ``perf/*`` and ``cost/*`` of one optimizer step that took ``seconds``.

    FLOPs are those executed; dense-equivalent tokens are those that the dense run would have processed.
    """
    lengths = facts.total_tokens
    metrics = {
        "perf/dense_equivalent_tokens_per_second": float(lengths[mini_batch.members].sum() / seconds),
        "perf/peak_memory_bytes": float(HOST.peak_memory_bytes()),
    }
    peak = HOST.peak_flops()
    if peak is not None and mini_batch.kind is StepKind.REAL:
        run = lengths[mini_batch.order].astype(np.float64)
        flops = run.sum() * flops_per_token(model.shape, float((run * run).sum() / run.sum() / 2))
        metrics["perf/mfu"] = float(flops / (seconds * model.topology.world_size * peak))
    return metrics | _cost(model, mini_batch, lengths)


def _cost(model: TrainableModel, mini_batch: StepPlan, lengths: np.ndarray) -> dict[str, float]:
    """Return ``cost/*``: a micro-batch's fitted costs on its slowest stage, and this mini-batch's predicted seconds."""
    if not model.fit.is_fitted:
        return {}
    cost = model.fit.model()
    slowest = max(cost.stages, key=lambda stage: stage.token)
    return {
        "cost/overhead_s": slowest.overhead,
        "cost/token_s": slowest.token,
        "cost/square_s": slowest.square,
        "cost/predicted_s": plan_seconds(cost, mini_batch, padded_lengths(lengths, model.rules.pad_multiple)),
    }

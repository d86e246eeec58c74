"""The throughput of an optimizer step, and the micro-batch costs that were fitted to measurements. No collectives."""

from __future__ import annotations

from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.distributed.platform import HOST
from megatron_rl.model.costs import flops_per_token
from megatron_rl.observability.timer import StepTimer
from megatron_rl.planning.cost import plan_seconds
from megatron_rl.planning.tokens import SampleTokens, tokens_of
from megatron_rl.types import BatchFacts, StepKind, StepPlan


def performance(model: TrainableModel, facts: BatchFacts, mini_batch: StepPlan, seconds: float) -> dict[str, float]:
    """Return the metrics ``perf/*`` and ``cost/*`` of one optimizer step that took ``seconds``.

    The model FLOPs utilisation ``perf/mfu`` counts the tokens that ran.
    ``perf/dense_equivalent_tokens_per_second`` counts the tokens that a run which drops no sample
    would have processed.
    """
    tokens = tokens_of(facts, share_prompts=model.rules.share_prompts, windows=model.shape.windows)
    metrics = {
        "perf/dense_equivalent_tokens_per_second": float(facts.total_tokens[mini_batch.members].sum() / seconds),
        "perf/peak_memory_bytes": float(HOST.peak_memory_bytes()),
    }
    peak = HOST.peak_flops()
    if peak is not None and mini_batch.kind is StepKind.REAL:
        run, squares = (float(x.sum()) for x in tokens.sums(mini_batch.order, mini_batch.microbatch_offsets))
        flops = run * flops_per_token(model.shape, squares / run / 2)
        metrics["perf/mfu"] = float(flops / (seconds * model.topology.world_size * peak))
    return metrics | _cost(model, mini_batch, tokens)


def step_times(timer: StepTimer, facts: BatchFacts) -> dict[str, float]:
    """Return the metrics ``time/*`` and ``perf/tokens_per_second`` of a supervised step.

    The throughput counts the tokens of all samples of the batch. The timer then starts the next
    step.
    """
    times = timer.take()
    return {**times, "perf/tokens_per_second": float(facts.total_tokens.sum() / times["time/step_s"])}


def _cost(model: TrainableModel, mini_batch: StepPlan, tokens: SampleTokens) -> dict[str, float]:
    """Return the metrics ``cost/*``; {} before the first fit of the cost model.

    They are the slowest pipeline stage's fitted seconds per micro-batch, per token and per squared
    token, and the seconds predicted for this mini-batch.
    """
    if not model.fit.is_fitted:
        return {}
    cost = model.fit.model()
    slowest = max(cost.stages, key=lambda stage: stage.token)
    return {
        "cost/overhead_s": slowest.overhead,
        "cost/token_s": slowest.token,
        "cost/square_s": slowest.square,
        "cost/predicted_s": plan_seconds(cost, mini_batch, tokens.padded(model.rules.pad_multiple)),
    }

"""The check of the trainer's log-probs against the engine's: their mean gap must stay below a limit.

passes/bitwise.py has the strict check, under which the log-probs must be equal.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Protocol

from megatron_rl.config import RolloutConfig
from megatron_rl.errors import EngineError
from megatron_rl.observability.metrics import GAPS, add_sums, divide
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.trainer.passes.passes import OldLogProbs
from megatron_rl.types import StepPlan, StepResult

log = logging.getLogger(__name__)
# Mean gap in nats per token. float32's limit is a hundred times the gap between two correct implementations.
WARN_GAP = {"float32": 1e-3, "bfloat16": 0.05}


class GapCheck(Protocol):
    """Compares the trainer's log-probs with the engine's, and raises EngineError if they are too far apart."""

    def of_pass(self, sums: Mapping[str, float], *, fresh: bool) -> dict[str, float]:
        """Check the gap that a log-prob pass measured, and return its metrics. Not a collective.

        sums: the pass's ``LogProbs.sums``, over all ranks.
        fresh: whether the engine sampled with the trainer's current weights.
        """
        ...

    def of_rollout(self, taken: TrainingBatch, old: OldLogProbs) -> dict[str, float]:
        """Compare a rollout's log π_old with the engine's log-probs, token by token; return metrics.

        A check that only limits mean gaps compares nothing here and returns {}. A collective if tokens
        are compared.

        taken, old: the rollout's batch, and its log π_old.
        """
        ...

    def of_step(
        self, old: OldLogProbs, step: StepPlan, result: StepResult, *, number: int, fresh: bool
    ) -> dict[str, float]:
        """Check the gap between an optimizer step's own log-probs and the engine's; return metrics. Not a collective.

        Returns {} if there is nothing to check or report for this step.

        old: log π_old of the step's rollout.
        number: the step's number within its rollout, from 0.
        fresh: whether the engine sampled with the weights that the rollout's first step starts from.
        """
        ...


class GapGuard:
    """Checks the mean |trainer's log-prob − engine's log-prob| of a token against two limits.

    Above ``rollout.max_logprob_gap`` it raises EngineError; above ``rollout.warn_logprob_gap`` it
    warns.
    """

    def __init__(self, rollout: RolloutConfig, dtype: str) -> None:
        """Keep the settings that give both limits.

        rollout: the section ``rollout``, with ``warn_logprob_gap`` and ``max_logprob_gap``.
        dtype: ``model.dtype``, which decides the default limit of the warning.
        """
        self.rollout, self.dtype = rollout, dtype

    def of_pass(self, sums: Mapping[str, float], *, fresh: bool) -> dict[str, float]:
        guard_logprob_gap(sums, self.rollout, self.dtype, fresh=fresh)
        return divide({name: sums[name] for name in ("tokens", *GAPS) if name in sums})

    def of_rollout(self, taken: TrainingBatch, old: OldLogProbs) -> dict[str, float]:
        return {}

    def of_step(
        self, old: OldLogProbs, step: StepPlan, result: StepResult, *, number: int, fresh: bool
    ) -> dict[str, float]:
        """Check the gap of the step's own log-probs to the engine's if they serve as π_old; return its metrics.

        Else return {}. ``GapCheck.of_step`` describes the arguments.
        """
        if step is not old.own:
            return {}
        measured = {name: result.sums[name] for name in ("tokens", *GAPS)}
        return self.of_pass(add_sums(old.sums, measured), fresh=fresh)


def guard_logprob_gap(sums: Mapping[str, float], rollout: RolloutConfig, dtype: str, *, fresh: bool = True) -> None:
    """Warn, or raise EngineError, if trainer and engine give different log-probs to the same tokens.

    The mean |gap| per token is compared with ``rollout.max_logprob_gap`` and
    ``rollout.warn_logprob_gap``. Without tokens nothing happens.

    sums: the sums of a log-prob pass or of an optimizer step over all ranks, with the keys of
        ``LogProbs.sums``.
    dtype: ``model.dtype``, which decides the default of ``rollout.warn_logprob_gap``.
    fresh: whether trainer and engine had the same weights. If not, a gap is expected: it only warns,
        and only if ``rollout.warn_logprob_gap`` is set.
    """
    if not sums.get("tokens"):
        return
    mean, highest = sums["logprob_gap_abs"] / sums["tokens"], sums["logprob_gap_max"]
    summary = (
        f"the engine's and the trainer's log-probs differ by {mean:.3g} nats per token in the mean, "
        f"{highest:.3g} at most"
    )
    if fresh and not mean <= (math.inf if rollout.max_logprob_gap is None else rollout.max_logprob_gap):
        raise EngineError(
            f"{summary}, above rollout.max_logprob_gap={rollout.max_logprob_gap}: it samples from other weights, "
            "another tokenizer, dtype or temperature. Compare them on one prompt (docs/vllm.md), or raise the setting "
            "if the difference is meant"
        )
    default = WARN_GAP[dtype] if fresh else math.inf
    limit = default if rollout.warn_logprob_gap is None else rollout.warn_logprob_gap
    if mean > limit:
        log.warning(
            "%s, above rollout.warn_logprob_gap=%g%s",
            summary,
            limit,
            "" if fresh else "; its weights are older than the trainer's",
        )

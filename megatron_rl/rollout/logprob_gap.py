"""The gap between the log-probs of engine and trainer, which is guarded where both have the same weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from megatron_rl.config import RolloutConfig
from megatron_rl.errors import EngineError

log = logging.getLogger(__name__)
# Nats per token in the mean; float32's is a hundred times the gap between two correct implementations.
WARN_GAP = {"float32": 1e-3, "bfloat16": 0.05}


def guard_logprob_gap(sums: Mapping[str, float], rollout: RolloutConfig, dtype: str, *, fresh: bool = True) -> None:
    """Warn, or raise EngineError, if trainer and engine give different log-probs to the same tokens.

    sums: of a log-prob pass (MegatronBackend.forward) or of an optimizer step, over all ranks, in nats; their mean per
        token is compared. A pass over no token is not judged.
    dtype: model.dtype.
    fresh: whether both had the same weights. If not, training explains a gap, and only a ``warn_logprob_gap`` that is
        set is compared.
    """
    if not sums.get("tokens"):
        return
    mean, highest = sums["logprob_gap_abs"] / sums["tokens"], sums["logprob_gap_max"]
    summary = (
        f"the engine's log-probs are {mean:.3g} nats per token from the trainer's in the mean, {highest:.3g} at most"
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

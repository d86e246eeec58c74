"""The check of ``rollout.bitwise``: the rollout engine and the trainer gave each token bitwise equal log-probs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rl.algorithm.finite import sample_name
from megatron_rl.errors import EngineError


def require_equal(
    trainer: np.ndarray,
    engine: np.ndarray,
    loss_mask: np.ndarray,
    response_tokens: np.ndarray,
    sample_ids: Sequence[str],
) -> float:
    """Raise EngineError if log π_old and log μ differ at a loss token; else return 0.0, their largest difference.

    The error names the first loss token whose log-probs differ.

    trainer, engine: float32 [T] flat over response tokens, log π_old and log μ.
    loss_mask: bool [T], True at loss tokens.
    response_tokens: int64 [S], the number of response tokens of each sample.
    sample_ids: S names; if empty, the message gives the sample's index.

    Example: two samples have 2 and 3 tokens, and the fourth of the 5 log-probs differs. The message
    names position 1 of the second sample.
    """
    differs = loss_mask & ~(trainer == engine)  # a NaN equals nothing
    if differs.any():
        first = int(np.argmax(differs))
        ends = np.cumsum(response_tokens)
        sample = int(np.searchsorted(ends, first, side="right"))
        position = first - int(ends[sample] - response_tokens[sample])
        ours, theirs = float(trainer[first]), float(engine[first])
        raise EngineError(
            f"rollout.bitwise=true: sample {sample_name(sample_ids, sample)}, position {position} of its response: the "
            f"engine's log-prob is {theirs!r} and the trainer's {ours!r}, {abs(ours - theirs):.3g} nats apart "
            f"({int(differs.sum())} such of {int(loss_mask.sum())} tokens). A matrix product here may depend on its "
            "other rows: run pytest tests/unit/model/test_invariant.py on this host, or set rollout.bitwise=false"
        )
    return float(np.abs(trainer - engine)[loss_mask].max(initial=0.0))

"""Speculative decoding in the embedded engine: what it holds for a run with ``rollout.speculation=history``."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

from megatron_rl.rollout.speculation.decode import SpeculativeDecoder
from megatron_rl.rollout.speculation.drafter import HistoryDrafter
from megatron_rl.rollout.speculation.history import History
from megatron_rl.rollout.speculation.pace import MeasuredPace, MeasuredSwitch


class Speculation:
    """Holds the history of earlier answers, and the decoder that drafts from it.

    model: the engine's model. ConfigError is raised if it cannot be decoded so.
    version: a callable that returns the version of the engine's weights.
    """

    def __init__(self, model: PreTrainedModel, version: Callable[[], int]) -> None:
        self.history = History()
        self.decode_rows = SpeculativeDecoder(
            model, HistoryDrafter(self.history, version), MeasuredPace(), MeasuredSwitch()
        )

    def take_counts(self) -> dict[str, int]:
        """Return metric name → count since the last call."""
        return self.decode_rows.counts.take()

"""Megatron-Core's model, schedule and optimizer behind one object: log-probs, gradients, an optimizer step."""

from megatron_rl.backend.backend import LogProbs, MegatronBackend
from megatron_rl.backend.batch import Batch

__all__ = ["Batch", "LogProbs", "MegatronBackend"]

"""Megatron-Core's model, schedule and optimizer behind one class, which computes log-probs, gradients and steps."""

from megatron_rl.backend.backend import LogProbs, MegatronBackend
from megatron_rl.backend.batch import Batch

__all__ = ["Batch", "LogProbs", "MegatronBackend"]

"""Supervised term: −Σ w_t · log π(t)."""

from __future__ import annotations

import torch


def cross_entropy(logprobs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Scalar sum. logprobs [T], weights [T], both over loss tokens."""
    return -(weights * logprobs).sum()

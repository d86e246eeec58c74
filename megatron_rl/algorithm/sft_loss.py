"""The supervised term of the loss, −Σ w_t · log π(t), which is the linear loss under weights of any sign."""

from __future__ import annotations

import torch


def cross_entropy(logprobs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the scalar −Σ_t w_t · log π_θ(t): maximum likelihood, or any loss of sums (algorithm/linear_loss.py).

    logprobs, weights: [T], both over loss tokens.

    Example: log π = (−1, −2), w = ½ each → 1.5.
    """
    return -(weights * logprobs).sum()

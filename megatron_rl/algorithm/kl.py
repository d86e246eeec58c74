"""KL to the reference per token: estimators of KL(π_θ ‖ π_ref) at tokens drawn from π_old (semantics §7)."""

from __future__ import annotations

import numpy as np
import torch


def kl_per_token(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, old_logprobs: torch.Tensor, *, estimator: str
) -> torch.Tensor:
    """Return [T] nats: the estimate of the KL at each token.

    With d = log π_ref − log π_θ (Schulman 2020, "Approximating KL divergence"): ``k1`` = −d, ``k2`` = d²/2,
    ``k3`` = e^d − d − 1, ``unbiased`` = (π_θ/π_old)·k3, whose ratio carries gradient (DeepSeek-V3.2, arXiv:2512.02556,
    eq. 7).
    """
    d = reference_logprobs - logprobs
    match estimator:
        case "k1":
            return -d
        case "k2":
            return 0.5 * d * d
        case "k3":
            return d.exp() - d - 1
        case "unbiased":
            return (logprobs - old_logprobs).exp() * (d.exp() - d - 1)
    raise ValueError(f"loss.kl_estimator={estimator!r} is not known")


def kl_penalty_per_token(old_logprobs: np.ndarray, reference_logprobs: np.ndarray, estimator: str) -> np.ndarray:
    """Return float64 [T] nats: KL(π_old ‖ π_ref) per token, for a reward.

    These are the estimates of ``kl_per_token`` at π_θ = π_old, without gradient. A pure function.

    old_logprobs, reference_logprobs: [T], under π_old and π_ref.
    estimator: with d = log π_ref − log π_old (Schulman 2020, "Approximating KL divergence"), ``k1`` = −d, ``k2`` = d²/2
               or ``k3`` = e^d − d − 1. Raises ValueError for another.

    Example: log-probs (−1.0, −2.0) against (−1.5, −2.0) → ``k1`` (0.5, 0.0), ``k3`` (0.10653, 0.0).
    """
    d = reference_logprobs.astype(np.float64) - old_logprobs.astype(np.float64)
    match estimator:
        case "k1":
            return -d
        case "k2":
            return 0.5 * d * d
        case "k3":
            return np.expm1(d) - d
    raise ValueError(f"loss.kl_estimator={estimator!r} is no penalty for a reward; choose one of k1, k2, k3")

"""Per-token estimates of KL(π_θ ‖ π_ref), policy to reference, at tokens drawn from π_old (docs/semantics.md §7)."""

from __future__ import annotations

import numpy as np
import torch

PENALTIES = ("k1", "k2", "k3")  # estimators for a KL in the reward; ``unbiased`` equals k3 at π_θ = π_old


def kl_per_token(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, old_logprobs: torch.Tensor, *, estimator: str
) -> torch.Tensor:
    """Return [T] nats: the estimate of KL(π_θ ‖ π_ref) at each token.

    logprobs, reference_logprobs, old_logprobs: [T], log π_θ, log π_ref and log π_old; ``unbiased``
        alone reads the last.

    Let d = log π_ref − log π_θ. The estimators are ``k1`` = −d, ``k2`` = d²/2 and ``k3`` =
    e^d − d − 1 (Schulman 2020, "Approximating KL divergence"), and ``unbiased`` = (π_θ/π_old)·k3
    (DeepSeek-V3.2, arXiv:2512.02556, eq. 7). The ratio π_θ/π_old carries gradient.
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
    """Return float64 [T] nats: the estimate of KL(π_old ‖ π_ref) per token, for a KL in the reward.

    It is ``kl_per_token`` at π_θ = π_old, in float64 and without gradient.

    old_logprobs, reference_logprobs: [T], under π_old and π_ref.
    estimator: ``k1``, ``k2`` or ``k3``. Raises ValueError for any other.

    Example: log-probs (−1.0, −2.0) against (−1.5, −2.0) → ``k1`` (0.5, 0.0), ``k3`` (0.10653, 0.0).
    """
    if estimator not in PENALTIES:
        raise ValueError(
            f"loss.kl_estimator={estimator!r} is no penalty for a reward; choose one of {', '.join(PENALTIES)}"
        )
    old, reference = (torch.from_numpy(values.astype(np.float64)) for values in (old_logprobs, reference_logprobs))
    return kl_per_token(old, reference, old, estimator=estimator).numpy()

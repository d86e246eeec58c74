"""KL to the reference per token, each an estimator of KL(π_θ ‖ π_ref) at tokens drawn from π_old. Semantics §7."""

from __future__ import annotations

import torch


def kl_per_token(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, old_logprobs: torch.Tensor, *, estimator: str) -> torch.Tensor:
    """[T] nats. With d = log π_ref − log π_θ (Schulman 2020, "Approximating KL divergence"):

    ``k1`` = −d · ``k2`` = d²/2 · ``k3`` = e^d − d − 1 · ``unbiased`` = (π_θ/π_old)·k3, the ratio carrying gradient
    (DeepSeek-V3.2, arXiv:2512.02556, eq. 7).
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

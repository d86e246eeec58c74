"""Logits of the tests, and log-probs and entropies as torch has them."""

from __future__ import annotations

import torch

# Float32 throughout: logits up to 20 carry some 1e-6 of rounding each, and a sum over the vocabulary adds its own.
SINGLE = {"rtol": 1e-5, "atol": 1e-5}


def reference(logits: torch.Tensor, targets: torch.Tensor, temperature: float, vocab_size: int):
    """Log-probs and entropies by torch.log_softmax in float64, over the true vocabulary."""
    distribution = (logits.double()[:, :vocab_size] / temperature).log_softmax(-1)
    return distribution.gather(1, targets[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


def gradients(
    function, logits: torch.Tensor, *coefficients: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """(outputs, gradient of Σ coefficient · output). A float64 leaf for the reference, the given dtype for what is
    tested."""
    leaf = logits.clone().requires_grad_()
    outputs = function(leaf)
    total = sum((c * x).sum() for c, x in zip(coefficients, outputs, strict=False))
    (gradient,) = torch.autograd.grad(total, leaf)
    return tuple(x.detach() for x in outputs), gradient

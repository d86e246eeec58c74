"""Makes the tests' reference of log-probs and entropies, as torch has them, and the gradients of both."""

from __future__ import annotations

import torch

# Float32 throughout: logits up to 20 carry some 1e-6 of rounding each, and a sum over the vocabulary adds its own.
SINGLE = {"rtol": 1e-5, "atol": 1e-5}


def reference(logits: torch.Tensor, targets: torch.Tensor, temperature: float, vocab_size: int):
    """Return log-probs and entropies by torch.log_softmax in float64, over the true vocabulary."""
    distribution = (logits.double()[:, :vocab_size] / temperature).log_softmax(-1)
    return distribution.gather(1, targets[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


def gradients(
    function, logits: torch.Tensor, *coefficients: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return the outputs and the gradient of Σ coefficient · output.

    The leaf is float64 for the reference, and has the given dtype for what is tested.
    """
    leaf = logits.clone().requires_grad_()
    outputs = function(leaf)
    total = sum((c * x).sum() for c, x in zip(coefficients, outputs, strict=False))
    (gradient,) = torch.autograd.grad(total, leaf)
    return tuple(x.detach() for x in outputs), gradient

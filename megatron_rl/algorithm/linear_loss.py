"""The linear loss: the loss of a function of samples' summed log-probs, cut into micro-batches and ranks at will.

Let L be any differentiable function of the sums s_i = Σ_t log π(t) over each sample's loss tokens.
By the chain rule

    ∇L = Σ_i ∂L/∂s_i · Σ_t ∇log π(t) = ∇ Σ_i Σ_t −c_i · log π(t)        with c_i = −∂L/∂s_i, a constant,

at the weights that gave s. So a forward-only pass gives s, L is evaluated on all samples at once,
and the schedule then runs the token sum −Σ c_i log π, in which no sample knows another: the halves
of a pair need not share a micro-batch, a rank or a pipeline's turn. The same holds for a value
head's numbers in place of log-probs. c_i has the place of an
advantage: a sample without it has no signal (semantics §2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.algorithm.finite import require_finite


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearLoss:
    """Holds the terms of a loss and the coefficients of the linear loss that has its gradient.

    terms: float64 [P], the addends of the loss, each of its own samples.
    coefficients: float64 [S], c_i = −∂(Σ terms)/∂s_i.

    Example: one term ½ s² at s = −2 → terms (2.0,), coefficients (2.0,).
    """

    terms: np.ndarray
    coefficients: np.ndarray


def linearised(
    terms: Callable[[torch.Tensor], torch.Tensor],
    sums: np.ndarray,
    *,
    sample_ids: tuple[str, ...] = (),
    way_out: str = "look for non-finite log-probs, and at the loss's settings",
) -> LinearLoss:
    """Return the terms of a loss at ``sums`` and the coefficients c [S] of its linear loss.

    terms: float64 [S] with gradient → [P], the addends of the loss.
    sums: [S], each sample's summed log-probs, or its value, from a forward-only pass.
    sample_ids: S names, for messages alone.

    Raises NonFiniteAdvantage for a sum or a coefficient that is not finite or beyond float32,
    naming the sample.

    Example: s = (−1, −3), terms −log σ(s_0 − s_1) → 0.1269, c = (0.1192, −0.1192).
    """
    require_finite(sums, "Σ log π (or the score)", sample_ids, way_out)
    given = torch.from_numpy(np.asarray(sums, dtype=np.float64).copy()).requires_grad_()
    losses = terms(given)
    (gradient,) = torch.autograd.grad(losses.sum(), given)
    coefficients = -gradient.numpy()
    require_finite(coefficients, "the coefficient ∂loss/∂log π", sample_ids, way_out)
    return LinearLoss(terms=losses.detach().numpy(), coefficients=coefficients)

"""A loss that is linear in the tokens' log-probs and has the gradient of any loss over samples' summed log-probs.

Let L be any differentiable function of the sums s_i = Σ_t log π(t) over each sample's loss tokens.
At the model weights that gave s, by the chain rule,

    ∇L = Σ_i ∂L/∂s_i · Σ_t ∇log π(t) = ∇ Σ_i Σ_t −c_i · log π(t)        with c_i = −∂L/∂s_i, a constant.

So a forward-only pass gives s, and L is evaluated on all samples at once. Then a training pass takes
the gradient of the token sum −Σ c_i log π, in which no sample depends on another. Its samples may be
divided over micro-batches and ranks in any way: the two responses of a pair need not share a
micro-batch or a rank. The same holds if s_i is a value head's score in place of summed log-probs. c_i
acts as the sample's advantage: a sample with c_i = 0 has no gradient, and may be dropped
(docs/semantics.md §2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.algorithm.finite import require_finite


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearLoss:
    """Holds a loss's terms, and coefficients c_i with which the linear loss −Σ_i c_i · s_i has the same gradient.

    terms: float64 [P], the addends of the loss, such as one per pair.
    coefficients: float64 [S], c_i = −∂(Σ terms)/∂s_i. s_i is sample i's summed log-probs, or its
        score by a value head.

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
    """Return a loss's terms at ``sums``, and c [S] such that −Σ_i c_i · s_i has the same gradient there as the loss.

    terms: a function from the sums, float64 [S] with gradient, to [P], the addends of the loss.
    sums: [S], s_i: each sample's summed log-probs or value-head score, from a forward-only pass.
    sample_ids: S names, for messages alone.
    way_out: what the error's message advises.

    Raises NonFiniteAdvantage, naming the sample, for a sum or a coefficient that is not finite or
    is beyond float32.

    Example: s = (−1, −3), terms −log σ(s_0 − s_1) → 0.1269, c = (0.1192, −0.1192).
    """
    require_finite(sums, "Σ log π (or the score)", sample_ids, way_out)
    given = torch.from_numpy(np.asarray(sums, dtype=np.float64).copy()).requires_grad_()
    losses = terms(given)
    (gradient,) = torch.autograd.grad(losses.sum(), given)
    coefficients = -gradient.numpy()
    require_finite(coefficients, "the coefficient ∂loss/∂log π", sample_ids, way_out)
    return LinearLoss(terms=losses.detach().numpy(), coefficients=coefficients)

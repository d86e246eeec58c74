"""On-policy distillation: advantages from the log-prob gap of teacher and student on the student's own tokens.

With tokens y_t drawn from the student, log π_S(y_t) − log π_T(y_t) is an unbiased estimate of the
reverse KL(π_S ‖ π_T) at token t. Its negative is the only reward of token t. On-policy reverse KL:
Agarwal et al. 2023, arXiv:2306.13649. Its policy gradient at γ = 1: Gu et al. 2023,
arXiv:2306.08543, section 2.2.
"""

from __future__ import annotations

import numpy as np

from megatron_rl.algorithm.gae import generalised_advantages


def distillation_advantages(
    student: np.ndarray,
    teacher: np.ndarray,
    loss_mask: np.ndarray,
    response_tokens: np.ndarray,
    *,
    discount: float,
    sample_ids: tuple[str, ...] = (),
) -> np.ndarray:
    """Return [T] float64: A_t = Σ_k γ^k (log π_T − log π_S)(t + k), over the sample's loss tokens; 0 elsewhere.

    student, teacher: [T] flat, log-probs of the same tokens, at the sampling temperature.
    loss_mask: bool [T], True at loss tokens.
    response_tokens: int64 [S], the number of response tokens of each sample.
    discount: γ in [0, 1]; at 0 a token's advantage is its own gap alone.

    Raises NonFiniteAdvantage, naming the sample, for a gap log π_T − log π_S that is not finite, such
    as at a token to which the teacher gives probability 0.

    Example: student (−1, −2), teacher (−1.5, −1), γ = 0 → (−0.5, 1.0); γ = 1 → (0.5, 1.0).
    """
    with np.errstate(invalid="ignore"):  # −inf − −inf, named below
        gap = np.where(loss_mask, teacher.astype(np.float64) - student.astype(np.float64), 0.0)
    advantages, _ = generalised_advantages(
        gap, np.zeros(len(gap)), loss_mask, response_tokens, gamma=discount, lam=1.0, sample_ids=sample_ids
    )
    return advantages

"""On-policy distillation: the per-token gap between teacher and student, on the student's own samples, as advantage.

With tokens y_t drawn from the student, log π_S(y_t) − log π_T(y_t) is an unbiased estimate of the
reverse KL(π_S ‖ π_T) at that place. Its negative is the reward of token t, and there is no other:
Agarwal et al. 2023, arXiv:2306.13649 (on-policy, reverse KL); Gu et al. 2023, arXiv:2306.08543,
section 2.2 (its policy gradient, at γ = 1).
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
    loss_mask: bool [T].
    response_tokens: int64 [S].
    discount: γ in [0, 1]; at 0 each token has its own gap alone.

    Raises NonFiniteAdvantage, naming the sample, for a gap that is not finite: the teacher gives a
    token no chance.

    Example: student (−1, −2), teacher (−1.5, −1), γ = 0 → (−0.5, 1.0); γ = 1 → (0.5, 1.0).
    """
    with np.errstate(invalid="ignore"):  # −inf − −inf, named below
        gap = np.where(loss_mask, teacher.astype(np.float64) - student.astype(np.float64), 0.0)
    advantages, _ = generalised_advantages(
        gap, np.zeros(len(gap)), loss_mask, response_tokens, gamma=discount, lam=1.0, sample_ids=sample_ids
    )
    return advantages

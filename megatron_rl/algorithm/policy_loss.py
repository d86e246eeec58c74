"""Policy terms: functions that return one loss per loss token; the sum of these is a micro-batch's policy loss.

Advantages arrive multiplied by w, a token's weight by ``loss.reduction``. That is exact, since for
w > 0 w·min(rA, clip(r)A) = min(r(wA), clip(r)(wA)). The same holds for the dual clip. The quadratic
term of ``dro`` has no factor A, so it is multiplied by w itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_rl.config import LossConfig

CompleteSums = Callable[[torch.Tensor], torch.Tensor]
"""A function from per-sequence sums over this rank's tokens to the sums over all tokens, without gradient."""


def identity(sums: torch.Tensor) -> torch.Tensor:
    """Return ``sums`` unchanged: a rank that holds whole sequences has nothing to add from other ranks."""
    return sums


class LossTokens(Protocol):
    """Describes the fields of a packed micro-batch that the loss reads, over the micro-batch's N loss tokens.

    sequences: int64 [N], the sequence of each token, counted from 0 to num_sequences − 1.
    advantages, weights: [N], w·A and w, where w is the token's weight by ``loss.reduction``.
    old_logprobs, rollout_logprobs, reference_logprobs: [N], log-probs by the trainer before the
        update, by the engine and by the reference policy. None: no pass computed them.
    kl_coefficient: β; None: ``loss.kl_coefficient``.
    measured: [N], how often the sums for the metrics count a token; None: once.
    """

    num_sequences: int
    sequences: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    old_logprobs: torch.Tensor | None
    rollout_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor | None
    kl_coefficient: float | None
    measured: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerm:
    """Holds three arrays [T] over T loss tokens: the loss, the ratio, and where clipping took effect.

    loss: the loss of each token.
    ratio: π_θ/π_old, as the policy term used it.
    clipped: bool, True at tokens that lost their gradient by clipping. Under ``cispo``: at tokens
        whose ratio was bounded.
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor


def policy_term(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    sequences: torch.Tensor,
    num_sequences: int,
    config: LossConfig,
    whole: CompleteSums = identity,
) -> PolicyTerm:
    """Compute each token's loss by the policy term that ``loss.policy`` names (docs/semantics.md §7).

    logprobs, old_logprobs: [T], at the sampling temperature; under ``dro`` the old log-probs are
        the engine's.
    advantages: [T], w·A of each token: its weight by ``loss.reduction`` times its advantage.
    weights: [T], w of each token.
    sequences: [T] int64, the sequence of each token within the micro-batch (``gspo``).
    whole: a function that adds sums [..., num_sequences] over the ranks that hold parts of the
        sequences (``gspo``).
    """
    low, high = 1 - config.clip_low, 1 + config.clip_high
    match config.policy:
        case "ppo":
            return ppo(logprobs, old_logprobs, advantages, low=low, high=high, dual_clip=config.dual_clip)
        case "gspo":
            return gspo(logprobs, old_logprobs, advantages, sequences, num_sequences, low=low, high=high, whole=whole)
        case "cispo":
            return cispo(logprobs, old_logprobs, advantages, low=low, high=high)
        case "importance_sampling":
            return importance_sampling(logprobs, old_logprobs, advantages)
        case "dro":
            return dro(logprobs, old_logprobs, advantages, weights, beta=config.dro_beta)
        case "reinforce":
            return reinforce(logprobs, old_logprobs, advantages)
    raise ValueError(f"loss.policy={config.policy!r} is not known")


def ppo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    low: float,
    high: float,
    dual_clip: float | None = None,
) -> PolicyTerm:
    """Compute −min(ρA, clip(ρ, low, high)·A) with ρ = π_θ/π_old.

    Schulman et al. 2017, arXiv:1707.06347, eq. 7, with separate bounds (DAPO's clip-higher,
    arXiv:2503.14476, eq. 10).

    logprobs, old_logprobs, advantages: see ``policy_term``.
    dual_clip: c; for A < 0 the loss is at most −cA (Ye et al. 2019, arXiv:1912.09729, eq. 5). None:
        no such limit.

    Example: ρ = 1.5, A = 2, bounds 0.8 and 1.2 → −min(3.0, 2.4) = −2.4, clipped.
    """
    return _clipped((logprobs - old_logprobs).exp(), advantages, low, high, dual_clip)


def gspo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    sequences: torch.Tensor,
    num_sequences: int,
    *,
    low: float,
    high: float,
    whole: CompleteSums = identity,
    counted: torch.Tensor | None = None,
) -> PolicyTerm:
    """Compute −min(sA, clip(s, low, high)·A), with s the geometric mean of a sequence's ratios ρ_t.

    GSPO-token, Zheng et al. 2025, arXiv:2507.18071, eq. 13 and 14. The value of s is (Π ρ_t)^(1/|y|)
    over a sequence of |y| tokens. Token t uses sg[s]·π_θ(t)/sg[π_θ(t)], which equals s and has a
    gradient by log π_θ(t) alone; sg stops the gradient.

    sequences, whole: see ``policy_term``.
    counted: [T], 1 at tokens that the geometric mean is taken over, 0 at others; None: all tokens.

    Example: a sequence of two tokens, ρ = (1.2, 1.0), A = 1, bounds 0.9 and 1.05 → s = √1.2 =
    1.095, clipped: −1.05 each.
    """
    difference = (logprobs - old_logprobs).detach()
    counted = torch.ones_like(difference) if counted is None else counted
    terms = torch.stack([difference * counted, counted])
    total, count = whole(difference.new_zeros(2, num_sequences).index_add_(1, sequences, terms))
    mean = (total / count.clamp(min=1)).exp()[sequences]
    return _clipped(mean * (logprobs - logprobs.detach()).exp(), advantages, low, high, None)


def cispo(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, *, low: float, high: float
) -> PolicyTerm:
    """Compute −sg[clip(ρ, low, high)]·A·log π_θ with ρ = π_θ/π_old, so that no token loses its gradient.

    sg stops the gradient. CISPO, MiniMax-M1, arXiv:2506.13585, eq. 4 and 5.

    Example: ρ = 1.5, A = 2, log π = −1, bounds 0 and 1.2 → −1.2·2·(−1) = 2.4, its gradient by log π
    −2.4.
    """
    ratio = (logprobs - old_logprobs).exp()
    bounded = ratio.detach().clamp(low, high)
    return PolicyTerm(loss=-bounded * advantages * logprobs, ratio=ratio, clipped=bounded != ratio.detach())


def importance_sampling(logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor) -> PolicyTerm:
    """Compute −ρA with ρ = π_θ/π_old, without clipping: the surrogate L^CPI of arXiv:1707.06347, eq. 6.

    Example: ρ = 1.5, A = 2 → −3.
    """
    ratio = (logprobs - old_logprobs).exp()
    return PolicyTerm(loss=-ratio * advantages, ratio=ratio, clipped=_nowhere(ratio))


def dro(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    beta: float,
) -> PolicyTerm:
    """Compute −A·log π_θ + w·β/2·(log π_θ − log μ)².

    DRO, Richemond et al. 2024, arXiv:2405.19107. Kimi k1.5 (arXiv:2501.12599, §2.3.2) gives the
    gradient of this form. The quadratic term has no factor A, so it has a gradient even if A = 0.

    rollout_logprobs: [T], log μ, where μ is the rollout engine's policy.
    advantages: [T], A, which contains the factor w.
    weights: [T], w of each token, by ``loss.reduction``.
    beta: β.

    Example: log π = −1, log μ = −1.5, A = 2, w = 1, β = 0.1 → 2 + 0.0125.
    """
    quadratic = 0.5 * beta * weights * (logprobs - rollout_logprobs) ** 2
    ratio = (logprobs - rollout_logprobs).exp()
    return PolicyTerm(loss=-logprobs * advantages + quadratic, ratio=ratio, clipped=_nowhere(ratio))


def reinforce(logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor) -> PolicyTerm:
    """Compute −A·log π_θ; the ratio π_θ/π_old is returned for the metrics alone.

    Williams 1992, "Simple statistical gradient-following algorithms".

    Example: log π = −1, A = 2 → 2.
    """
    ratio = (logprobs - old_logprobs).exp()
    return PolicyTerm(loss=-logprobs * advantages, ratio=ratio, clipped=_nowhere(ratio))


def _nowhere(ratio: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(ratio, dtype=torch.bool)


def _clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, dual_clip: float | None
) -> PolicyTerm:
    plain, bounded = ratio * advantages, ratio.clamp(low, high) * advantages
    objective = torch.minimum(plain, bounded)
    clipped = bounded < plain
    if dual_clip is not None:
        floor = dual_clip * advantages
        clipped = clipped | ((advantages < 0) & (floor > objective))
        objective = torch.where(advantages < 0, torch.maximum(objective, floor), objective)
    return PolicyTerm(loss=-objective, ratio=ratio, clipped=clipped)

"""Policy terms over loss tokens: per-token losses whose sum is the loss. The advantages come with their weights folded in.

Folding is exact: for w > 0, w·min(rA, clip(r)A) = min(r(wA), clip(r)(wA)), and so for the dual clip. ``dro``'s quadratic is
not multiplied by the advantage and takes w itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_rl.config import LossConfig

Whole = Callable[[torch.Tensor], torch.Tensor]
"""Sums over this rank's tokens → sums over all tokens, without gradient."""


def unsplit(sums: torch.Tensor) -> torch.Tensor:
    """Where a rank holds whole sequences its sums are whole."""
    return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerm:
    """Per loss token [T]: ``loss``, the ratio π_θ/π_old it used, and where clipping took the gradient away (bool)."""

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
    whole: Whole = unsplit,
) -> PolicyTerm:
    """One of semantics §7's terms.

    logprobs, old_logprobs [T] at the sampling temperature (``dro``: the engine's as the old ones) · advantages [T] = w·A ·
    weights [T] = w · sequences [T] int64, the
    sequence of each token within the micro-batch, and ``whole``, which completes its sums where ranks share it (``gspo``).

    Example (``ppo``, clip 0.2): ratio 1.5 and w·A = 2 give loss −min(3.0, 1.2·2) = −2.4, clipped.
    """
    ratio = (logprobs - old_logprobs).exp()
    never = torch.zeros_like(ratio, dtype=torch.bool)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    match config.policy:
        case "ppo":
            return _clipped(ratio, advantages, low, high, config.dual_clip)
        case "gspo":
            return _clipped(_sequence_ratio(logprobs, old_logprobs, sequences, num_sequences, whole), advantages, low, high, None)
        case "cispo":  # MiniMax-M1, arXiv:2506.13585, eq. 4 and 5
            bounded = ratio.detach().clamp(low, high)
            return PolicyTerm(loss=-bounded * advantages * logprobs, ratio=ratio, clipped=bounded != ratio.detach())
        case "importance_sampling":
            return PolicyTerm(loss=-ratio * advantages, ratio=ratio, clipped=never)
        case "dro":  # Kimi / Richemond et al., arXiv:2405.19107
            quadratic = 0.5 * config.dro_beta * weights * (logprobs - old_logprobs) ** 2
            return PolicyTerm(loss=-logprobs * advantages + quadratic, ratio=ratio, clipped=never)
        case "reinforce":
            return PolicyTerm(loss=-logprobs * advantages, ratio=ratio, clipped=never)
    raise ValueError(f"loss.policy={config.policy!r} is not known")


def _clipped(ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, dual_clip: float | None) -> PolicyTerm:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), with the dual clip for A < 0 (arXiv:1912.09729, eq. 5)."""
    plain, bounded = ratio * advantages, ratio.clamp(low, high) * advantages
    objective = torch.minimum(plain, bounded)
    clipped = bounded < plain
    if dual_clip is not None:
        floor = dual_clip * advantages
        clipped = clipped | ((advantages < 0) & (floor > objective))
        objective = torch.where(advantages < 0, torch.maximum(objective, floor), objective)
    return PolicyTerm(loss=-objective, ratio=ratio, clipped=clipped)


def _sequence_ratio(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, sequences: torch.Tensor, num_sequences: int, whole: Whole
) -> torch.Tensor:
    """GSPO-token (arXiv:2507.18071, eq. 14): the sequence's geometric-mean ratio in value, each token's own in gradient."""
    difference = (logprobs - old_logprobs).detach()
    each = torch.stack([difference, torch.ones_like(difference)])
    total, count = whole(difference.new_zeros(2, num_sequences).index_add_(1, sequences, each))
    mean = (total / count.clamp(min=1)).exp()[sequences]
    return mean * (logprobs - logprobs.detach()).exp()

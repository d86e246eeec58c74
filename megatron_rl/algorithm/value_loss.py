"""The critic's loss: a sum over loss tokens, each weighted as in the policy loss (docs/semantics.md §8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTerm:
    """Holds the critic's loss over N loss tokens, and marks the tokens whose clipped error it counts.

    loss: scalar, the sum over tokens.
    clipped: bool [N], True at tokens whose clipped error is larger than the unclipped one.
    """

    loss: torch.Tensor
    clipped: torch.Tensor


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, weights: torch.Tensor, *, clip: float | None
) -> ValueTerm:
    """Compute Σ_t w_t · ½ · max((V − R)², (clip(V, V_old − c, V_old + c) − R)²), the value loss of PPO.

    Schulman et al. 2017, arXiv:1707.06347, eq. 9, with the clipping of its published code
    (openai/baselines, ppo2), as in verl's ``compute_value_loss``. Suppose V is outside of V_old ± c.
    If V moved away from R, the unclipped error is larger, and its gradient pulls V back. If V moved
    towards R, the clipped error is larger and has no gradient, so V moves no further.

    values: [N], V, with gradient.
    old_values: [N], V_old, the values at the rollout's weights, without gradient.
    returns: [N], R (algorithm/gae.py), without gradient.
    weights: [N], w_t by ``loss.reduction``; 0 in fillers, which are micro-batches without a loss.
    clip: c; None: Σ_t w_t · ½ · (V − R)².

    Example: V = 1, V_old = 0, w = 1, c = 0.5. R = 2 → max(1, 2.25)/2 = 1.125, clipped. R = −1 →
    max(4, 2.25)/2 = 2, not clipped.
    """
    if clip is not None and not clip > 0:
        raise ValueError(
            f"the value clip is {clip}, and must be above 0: the critic could not move; None switches clipping off"
        )
    error = (values - returns) ** 2
    if clip is None:
        return ValueTerm(loss=0.5 * (weights * error).sum(), clipped=torch.zeros_like(values, dtype=torch.bool))
    bounded = (torch.clamp(values, old_values - clip, old_values + clip) - returns) ** 2
    return ValueTerm(loss=0.5 * (weights * torch.maximum(error, bounded)).sum(), clipped=(bounded > error).detach())

"""Losses of preference pairs as functions of both responses' summed log-probs, or of a reward model's two scores.

Each loss is a function ℓ of the margin m = r_w − r_l between the rewards of the chosen response w
and the rejected response l:

    loss            reward r of a response y                       ℓ(m)
    dpo             β · (log π(y) − log π_ref(y))                  −(1 − ε) log σ(m − γ) − ε log σ(γ − m)
    hinge           β · (log π(y) − log π_ref(y))                  max(0, 1 − m)
    ipo             (log π(y) − log π_ref(y)) / |y|                (m − 1/(2τ))²
    simpo           β · log π(y) / |y|                             −(1 − ε) log σ(m − γ) − ε log σ(γ − m)
    bradley_terry   the value head's number                        −log σ(m − γ)

log π(y) is the sum over the response's loss tokens, |y| their number. Of the section ``preference``,
``beta`` is β and τ, ``margin`` is γ and ``label_smoothing`` is ε.

- dpo: Rafailov et al. 2023, arXiv:2305.18290, eq. 7. Its ε: Mitchell 2023, "A note on DPO with
  noisy preferences". Its γ: Amini et al. 2024, arXiv:2402.10571.
- hinge: the loss of SLiC, Zhao et al. 2023, arXiv:2305.10425, on DPO's rewards.
- ipo: Azar et al. 2023, arXiv:2310.12036, eq. 17, per token.
- simpo: Meng et al. 2024, arXiv:2405.14734, eq. 6.
- bradley_terry: Ouyang et al. 2022, arXiv:2203.02155, eq. 1.

A response's coefficient is −∂ℓ/∂ log π(y), or −∂ℓ/∂r under bradley_terry.

Invariants (``assert_invariants`` in tests/unit/algorithm/test_preference_loss.py):

1. The coefficients of a pair depend on that pair alone.
2. If ε = 0 and the loss is not ipo, the chosen response's coefficient is ≥ 0 and the rejected
   response's is ≤ 0.
3. Under ``hinge`` both are exactly 0 if the margin is at least 1: such a pair has no gradient.
4. Swapping every pair negates every margin.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from megatron_rl.algorithm.linear_loss import LinearLoss, linearised
from megatron_rl.config import PreferenceConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairScores:
    """Holds the inputs of a pair loss for 2·P responses, in the order chosen, rejected, chosen, rejected and so on.

    sums: float64 [2P], summed log-probs in nats, or a reward model's scores.
    reference: float64 [2P], summed log-probs of the reference policy; None if the loss reads none.
    loss_tokens: int64 [2P], the number of loss tokens of each response.
    sample_ids: 2P names, for messages alone.

    Example: one pair whose chosen response has 3 tokens: ``sums=[-4.0, -9.0], reference=[-5.0,
    -8.0], loss_tokens=[3, 4]``. Under ``dpo`` with β = 0.1 the rewards are (0.1, −0.1), the margin
    is 0.2 and the loss 0.598.
    """

    sums: np.ndarray
    reference: np.ndarray | None
    loss_tokens: np.ndarray
    sample_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairOutcome:
    """Holds the losses, rewards and coefficients of P pairs.

    losses: float64 [P], the loss of each pair.
    rewards: float64 [2P], each response's reward r (see the module), in the order of PairScores.
    coefficients: float64 [2P], minus the derivative of Σ losses by each number of
        ``PairScores.sums`` (algorithm/linear_loss.py).
    """

    losses: np.ndarray
    rewards: np.ndarray
    coefficients: np.ndarray

    @property
    def margins(self) -> np.ndarray:
        """Return [P], each chosen response's reward less the rejected response's."""
        return self.rewards[0::2] - self.rewards[1::2]


def compare(scores: PairScores, config: PreferenceConfig) -> PairOutcome:
    """Return each pair's loss by ``preference.loss``, and each response's reward and coefficient (``PairOutcome``).

    Raises NonFiniteAdvantage, naming the sample, if a number of ``scores.sums`` or a coefficient is
    not finite.
    Raises ValueError for an odd number of responses or a missing reference.
    """
    if len(scores.sums) % 2:
        raise ValueError(f"{len(scores.sums)} responses are no pairs; give the chosen and the rejected one in turns")
    if config.needs_reference and scores.reference is None:
        raise ValueError(f"preference.loss={config.loss} reads the reference policy's log-probs, and none are given")
    linear: LinearLoss = linearised(
        lambda sums: _losses(_rewards(sums, scores, config), config), scores.sums, sample_ids=scores.sample_ids
    )
    rewards = _rewards(torch.from_numpy(np.asarray(scores.sums, dtype=np.float64)), scores, config)
    return PairOutcome(losses=linear.terms, rewards=rewards.numpy(), coefficients=linear.coefficients)


def _rewards(sums: torch.Tensor, scores: PairScores, config: PreferenceConfig) -> torch.Tensor:
    """Return r [2P], the reward of each response."""
    ratio = sums - torch.from_numpy(scores.reference) if config.needs_reference else sums
    tokens = torch.from_numpy(np.maximum(scores.loss_tokens, 1))
    match config.loss:
        case "dpo" | "hinge":
            return config.beta * ratio
        case "ipo":
            return ratio / tokens
        case "simpo":
            return config.beta * ratio / tokens
        case "bradley_terry":
            return ratio
    raise ValueError(f"preference.loss={config.loss!r} is not known")


def _losses(rewards: torch.Tensor, config: PreferenceConfig) -> torch.Tensor:
    """Return ℓ [P], the loss of each pair, from rewards [2P]."""
    margins = rewards[0::2] - rewards[1::2]
    match config.loss:
        case "hinge":
            return torch.relu(1.0 - margins)
        case "ipo":
            return (margins - 1.0 / (2.0 * config.beta)) ** 2
    over, smoothing = margins - config.margin, config.label_smoothing
    return -(1.0 - smoothing) * logsigmoid(over) - smoothing * logsigmoid(-over)


def pair_metrics(outcome: PairOutcome, scores: PairScores, *, prefix: str = "preference/", suffix: str = "") -> dict:
    """Return {metric name: mean over pairs}: loss, accuracy, margin, and both responses' rewards and log-probs.

    The log-probs are each response's sum; with a reward model, its scores stand in for them. For
    accuracy, a pair of equal rewards counts as wrong.

    prefix, suffix: texts before and after each metric's name.

    Example: margins (0.2, −0.1) → accuracy 0.5, margin 0.05.
    """
    values = {
        "loss": outcome.losses,
        "accuracy": outcome.margins > 0,
        "margin": outcome.margins,
        "chosen_reward": outcome.rewards[0::2],
        "rejected_reward": outcome.rewards[1::2],
        "chosen_logprob": scores.sums[0::2],
        "rejected_logprob": scores.sums[1::2],
    }
    return {f"{prefix}{name}{suffix}": float(np.mean(value)) for name, value in values.items()}

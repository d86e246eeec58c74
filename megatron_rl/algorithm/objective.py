"""The whole loss of a micro-batch, Σ policy + Σ w·(β·kl − c·entropy), and the sums that the metrics divide."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megatron_rl.algorithm import own_policy
from megatron_rl.algorithm.kl import kl_per_token
from megatron_rl.algorithm.policy_loss import CompleteSums, PolicyTerm, identity, policy_term
from megatron_rl.algorithm.sft_loss import cross_entropy
from megatron_rl.config import LossConfig
from megatron_rl.users_code import is_own


class LossTokens(Protocol):
    """Describes the fields of a packed micro-batch that the loss reads, over its N loss tokens.

    kl_coefficient: β, or None for the configuration's.
    measured: [N], 1 at tokens that the sums for the metrics count and 0 at others; None: all count.
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


class Objective:
    """Computes the loss of a micro-batch, for the policy or for supervised rows.

    ``policy`` and ``supervised``: (micro-batch, logprobs [N], entropy [N]) → (loss sum, float64 [9]: loss, tokens,
    entropy, kl, clipped, ratio, and of the gap to the engine's log-probs |log π − log μ|, its k3 and its maximum).

    whole: adds per-sequence sums over the ranks that hold parts of the sequences (context parallelism).
    enter_own: entered, with the name "loss", around each call of a user's policy loss; bounds its time.
    """

    def __init__(
        self, config: LossConfig, whole: CompleteSums = identity, *, term: own_policy.OwnPolicy | None = None
    ) -> None:
        """term: computes the policy term, in place of the one that ``loss.policy`` names."""
        self.config = config
        self.whole = whole
        self.enter_own: Callable[[str], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._own = term or (own_policy.resolve(config) if is_own(config.policy) else None)

    @property
    def trains_entropy(self) -> bool:
        return self.config.entropy_coefficient != 0

    def policy(
        self, tokens: LossTokens, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        old = logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs
        term = self._policy_term(tokens, logprobs, old)
        loss = term.loss.sum()
        kl = logprobs.new_zeros(())
        if tokens.reference_logprobs is not None:
            per_token = kl_per_token(logprobs, tokens.reference_logprobs, old, estimator=config.kl_estimator)
            kl = per_token
            coefficient = config.kl_coefficient if tokens.kl_coefficient is None else tokens.kl_coefficient
            if coefficient:  # a coefficient of 0 only measures the KL: 0 · inf would be NaN
                loss = loss + coefficient * (tokens.weights * per_token).sum()
        if self.trains_entropy:
            loss = loss - config.entropy_coefficient * (tokens.weights * entropy).sum()
        per_token = entropy, kl, term.clipped, term.ratio
        return loss, _sums(loss, tokens.measured, logprobs, per_token, gap=logprobs.detach() - tokens.rollout_logprobs)

    def _policy_term(self, tokens: LossTokens, logprobs: torch.Tensor, old: torch.Tensor) -> PolicyTerm:
        if self._own is not None:
            given = own_policy.PolicyTokens(
                logprobs=logprobs,
                old_logprobs=old,
                rollout_logprobs=tokens.rollout_logprobs,
                advantages=tokens.advantages,
                weights=tokens.weights,
                sequences=tokens.sequences,
                num_sequences=tokens.num_sequences,
                complete_sums=self.whole,
            )
            with self.enter_own("loss"):
                return self._own(given)
        # dro's quadratic is against μ (semantics §7).
        behaviour = tokens.rollout_logprobs if self.config.policy == "dro" else old
        return policy_term(
            logprobs,
            behaviour,
            tokens.advantages,
            tokens.weights,
            tokens.sequences,
            tokens.num_sequences,
            self.config,
            self.whole,
        )

    def supervised(
        self, tokens: LossTokens, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss = cross_entropy(logprobs, tokens.weights)
        zero = logprobs.new_zeros(())
        return loss, _sums(loss, None, logprobs, (entropy, zero, zero, zero), gap=zero)


def _sums(
    loss: torch.Tensor,
    measured: torch.Tensor | None,
    logprobs: torch.Tensor,
    per_token: Sequence[torch.Tensor],
    *,
    gap: torch.Tensor,
) -> torch.Tensor:
    """Return float64 [9]: the loss, and over the measured tokens their count, the sums of ``per_token`` and the gap's.

    per_token: entropy, kl, clipped and ratio, each [N] or [].
    gap: [N] or [], log π − log μ in nats: the sums of its absolute value and of its k3, and the largest absolute value.
    """
    tokens = torch.full((), logprobs.shape[0], device=logprobs.device)
    gap = gap.double()
    summed = [*(x.detach() for x in per_token), gap.abs(), (-gap).exp() + gap - 1]
    if measured is not None:
        counted = measured > 0  # a token that is not measured may be NaN or infinite
        summed = [torch.where(counted, x, 0) for x in summed]
        tokens = counted.sum()
    absolute = summed[-2]
    highest = absolute.max() if absolute.numel() else absolute.sum()
    return torch.stack([x.detach().double() for x in (loss, tokens, *(x.sum() for x in summed), highest)])

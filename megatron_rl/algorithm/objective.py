"""The loss of a micro-batch, Σ_t policy_t + w_t·(β·kl_t − c·entropy_t), and sums over its tokens for the metrics.

policy_t is a token's policy loss, which contains w_t already (policy_loss.py). w_t is the reduction's
weight of a token, β the coefficient of the KL to the reference policy, and c the coefficient of the
entropy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from megatron_rl.algorithm.policy_loss import CompleteSums, LossTokens, PolicyTerm, identity, policy_term
from megatron_rl.config import LossConfig
from megatron_rl.users_code import is_own

if TYPE_CHECKING:
    from megatron_rl.algorithm.own_policy import OwnPolicy


class Objective:
    """Computes the loss of a micro-batch: by ``policy`` in RL, by ``supervised`` on given responses.

    Both methods take a micro-batch's N loss tokens, their log-probs [N] and entropies [N]. They
    return the loss, a scalar with gradient, and nine numbers for the metrics, float64 [9]:

    - the loss and the number of tokens, each counted ``LossTokens.measured`` times;
    - over these tokens the sums of entropy, KL, clip mark (1 if clipped), ratio π_θ/π_old, |g| and
      e^−g + g − 1;
    - over these tokens the maximum of |g|. Here g = log π − log μ, and μ is the engine's policy.

    whole: a function that adds per-sequence sums over the ranks that hold parts of the sequences
        (context parallelism).
    enter_own: a function that is called with "loss" before each call of a user's policy loss. The
        context manager that it returns surrounds the call, and bounds its time.
    """

    def __init__(self, config: LossConfig, whole: CompleteSums = identity, *, term: OwnPolicy | None = None) -> None:
        """Use ``term``, a user's policy loss, as the policy term; None: the term that ``loss.policy`` names.

        whole: completes per-sequence sums over context-parallel ranks (see the class).
        """
        self.config = config
        self.whole = whole
        self.enter_own: Callable[[str], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._own: Callable[[LossTokens, torch.Tensor, torch.Tensor], PolicyTerm] | None = None
        if term is not None or is_own(config.policy):
            from megatron_rl.algorithm.own_policy import OwnTerm, resolve

            self._own = OwnTerm(term or resolve(config), whole)

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
            from megatron_rl.algorithm.kl import kl_per_token

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
            with self.enter_own("loss"):
                return self._own(tokens, logprobs, old)
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


def cross_entropy(logprobs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the scalar −Σ_t w_t · log π_θ(t): maximum likelihood, or a linear loss (algorithm/linear_loss.py).

    logprobs, weights: [T], over loss tokens; weights may have any sign.

    Example: log π = (−1, −2), w = ½ each → 1.5.
    """
    return -(weights * logprobs).sum()


def _sums(
    loss: torch.Tensor,
    measured: torch.Tensor | None,
    logprobs: torch.Tensor,
    per_token: Sequence[torch.Tensor],
    *,
    gap: torch.Tensor,
) -> torch.Tensor:
    """Return the nine numbers for metrics that ``Objective`` lists, float64 [9] without gradient.

    measured: [N], how often the sums count a token; None: once.
    per_token: entropy, kl, clipped and ratio, each [N] or a scalar 0. Each is summed over tokens.
    gap: [N] or a scalar 0, g = log π − log μ in nats. It gives the sums of |g| and of e^−g + g − 1, a
        KL estimate, and the largest |g|.
    """
    gap = gap.double()
    values = [*(x.detach() for x in per_token), gap.abs(), (-gap).exp() + gap - 1]
    if measured is None:
        tokens, sums = torch.full((), logprobs.shape[0], device=logprobs.device), [x.sum() for x in values]
    else:
        # a token that is not measured may be NaN or infinite
        values = [torch.where(measured > 0, x, 0) for x in values]
        tokens, sums = measured.sum(), [(x * measured).sum() for x in values]
    absolute = values[-2]
    highest = absolute.max() if absolute.numel() else absolute.sum()
    return torch.stack([x.detach().double() for x in (loss, tokens, *sums, highest)])

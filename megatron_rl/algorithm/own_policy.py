"""A policy loss of the user's own: ``loss.policy=module:function``, and its contract.

    def loss(tokens: PolicyTokens, **loss.arguments) -> Tensor [N] or PolicyTerm

The function returns one loss per loss token, and their sum is the micro-batch's loss. A mini-batch
may be divided over micro-batches and ranks in any way, and samples may be dropped. So a token's
loss must not depend on that division. From this the contract follows (docs/your-own.md).
algorithm/own_policy_check.py tries each property of the contract on random tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_rl import users_code
from megatron_rl.algorithm.policy_loss import CompleteSums, LossTokens, PolicyTerm, identity
from megatron_rl.config import LossConfig
from megatron_rl.errors import ConfigError

OwnPolicy = Callable[["PolicyTokens"], PolicyTerm]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyTokens:
    """Holds the N loss tokens of a micro-batch, as a policy loss reads them.

    logprobs: float32 [N], log π_θ at the sampling temperature; no other tensor carries a gradient.
    old_logprobs: float32 [N], log π_old, by the trainer at the rollout's weights.
    rollout_logprobs: float32 [N], log μ, by the engine.
    advantages: float32 [N], w·A: the reduction's weight times the advantage, times the token's
        importance weight if there is one.
    weights: float32 [N], w, for a part of the loss that the advantage does not multiply.
    sequences: int64 [N], the sample of each token within the micro-batch, from 0.
    num_sequences: the number of samples in the micro-batch.
    complete_sums: a function from per-sample sums [..., num_sequences] over this rank's tokens to
        the sums over all tokens, without gradient. Under context parallelism a rank holds only a
        part of each sample's tokens.

    Example: −ρ·A, with nothing clipped: ``-(tokens.logprobs - tokens.old_logprobs).exp() *
    tokens.advantages``.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    sequences: torch.Tensor
    num_sequences: int
    complete_sums: CompleteSums = identity


@dataclass(frozen=True, slots=True)
class OwnTerm:
    """Holds a user's policy loss; a call computes the losses of a micro-batch's N loss tokens with it.

    function: takes a PolicyTokens and returns a PolicyTerm.
    whole: a function that adds per-sample sums over ranks (``PolicyTokens.complete_sums``).
    """

    function: OwnPolicy
    whole: CompleteSums

    def __call__(self, tokens: LossTokens, logprobs: torch.Tensor, old: torch.Tensor) -> PolicyTerm:
        """Return the loss, the ratio π_θ/π_old and the clip mark (True if clipped) of each loss token.

        logprobs, old: float32 [N], log π_θ and log π_old.
        """
        return self.function(
            PolicyTokens(
                logprobs=logprobs,
                old_logprobs=old,
                rollout_logprobs=tokens.rollout_logprobs,
                advantages=tokens.advantages,
                weights=tokens.weights,
                sequences=tokens.sequences,
                num_sequences=tokens.num_sequences,
                complete_sums=self.whole,
            )
        )


def resolve(config: LossConfig) -> OwnPolicy:
    """Return the function that ``loss.policy`` names, bound to ``loss.arguments``, so that it takes PolicyTokens alone.

    The returned function checks the user's result and makes a PolicyTerm of it. Raises ConfigError
    if the user's function cannot be imported, or cannot be called with these arguments.
    """
    key = f"loss.policy={config.policy!r}"
    function = users_code.resolve(config.policy, {}, what=key, form="module:function")
    if not callable(function):
        raise ConfigError(f"{key} is a {type(function).__name__}, which cannot be called; name a function")
    try:
        inspect.signature(function).bind(None, **config.arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key} cannot be called with a PolicyTokens and loss.arguments={dict(config.arguments)}: {error}"
        ) from None

    def term(tokens: PolicyTokens) -> PolicyTerm:
        return _as_term(function(tokens, **config.arguments), tokens, key)

    return term


def _as_term(returned: object, tokens: PolicyTokens, key: str) -> PolicyTerm:
    if isinstance(returned, torch.Tensor):
        ratio = (tokens.logprobs.detach() - tokens.old_logprobs).exp()
        returned = PolicyTerm(loss=returned, ratio=ratio, clipped=torch.zeros_like(ratio, dtype=torch.bool))
    if not isinstance(returned, PolicyTerm):
        raise ConfigError(f"{key} returned a {type(returned).__name__}; return one loss per token, a tensor [N]")
    wanted = tokens.logprobs
    if returned.loss.shape != wanted.shape or returned.loss.dtype != wanted.dtype:
        raise ConfigError(
            f"{key} returned losses of shape {list(returned.loss.shape)} and {returned.loss.dtype} for "
            f"{list(wanted.shape)} tokens of {wanted.dtype}; return one loss per token, without a sum or a mean"
        )
    return returned

"""Tests of a user's own policy loss against its contract, on random tokens. They find faults, and prove nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_rl.algorithm.contract import Finding
from megatron_rl.algorithm.own_policy import OwnPolicy, PolicyTokens, resolve
from megatron_rl.config import LossConfig
from megatron_rl.errors import ConfigError

ZERO = "a zero advantage gives a zero loss and a zero gradient"
SCALES = "advantages and weights times 4 give 4 times the loss and the gradient"
ADDS = "a sample's losses do not depend on the other samples of its micro-batch"
SPLITS = "a sample's losses do not depend on how its tokens are split over ranks"


def require(config: LossConfig) -> None:
    """Raise ConfigError for the first property of the contract that ``loss.policy`` lacks.

    One property is not demanded: that a zero advantage gives a zero loss and gradient. Only
    ``skip.mode=exact`` refuses a loss without it (algorithm/signal.py).
    """
    for finding in check(config):
        if not finding.holds and finding.name != ZERO:
            raise ConfigError(
                f"loss.policy={config.policy!r} breaks its contract ({finding.name}): {finding.detail}; "
                f"`megatron-rl check --loss {config.policy}` tries every property (docs/your-own.md)"
            )


def trains_without_advantage(config: LossConfig) -> bool:
    """Return whether ``loss.policy``, tried on random tokens, gives one of zero advantage a loss or a gradient."""
    term = resolve(config)
    return not _zero(term, _cases(torch.float64)).holds


def check(config: LossConfig) -> list[Finding]:
    """Return one Finding per property of the contract; only the first if that one fails.

    The properties are tried on random tokens, with π_θ equal to π_old, near it, and far from it.
    """
    term, cases = resolve(config), _cases(torch.float64)
    first = _values(term)
    if not first.holds:
        return [first]
    return [first, *(attempt(term, cases) for attempt in (_unchanged, _scales, _adds, _splits, _zero))]


def finite_differences(config: LossConfig, gap: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (autograd, numeric), [N] each: the derivative of the summed loss by each of N random tokens' log π_θ.

    ``autograd`` is from automatic differentiation, ``numeric`` from central differences. The two are
    equal unless the loss stops a gradient on purpose, as CISPO's does.

    gap: the standard deviation of log π_θ − log π_old.
    """
    term, tokens = resolve(config), _tokens(torch.float64, gap)
    _, gradient = _evaluate(term, tokens)
    step, numeric = 1e-6, torch.zeros_like(gradient)
    for index in range(len(numeric)):
        moved = torch.zeros_like(numeric)
        moved[index] = step
        sums = [
            term(replace(tokens, logprobs=tokens.logprobs.detach() + sign * moved)).loss.sum().detach()
            for sign in (1, -1)
        ]
        numeric[index] = (sums[0] - sums[1]) / (2 * step)
    return gradient, numeric


_LENGTHS = (5, 1, 8, 3, 2, 6)
_WITHOUT_ADVANTAGE = (2, 4)  # the samples with an advantage of 0
_GAPS = (0.0, 0.1, 1.0, 5.0)  # standard deviations of log π_θ − log π_old


def _tokens(dtype: torch.dtype, gap: float) -> PolicyTokens:
    """Return random tokens of six samples, two of them with an advantage of 0.

    gap: the standard deviation of log π_θ − log π_old.
    """
    draw = torch.Generator().manual_seed(17)
    sequences = torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS))
    shape = (len(sequences),)
    old = -3 * torch.rand(shape, generator=draw, dtype=torch.float64)
    logprobs = old + gap * torch.randn(shape, generator=draw, dtype=torch.float64)
    rollout = old + 0.05 * torch.randn(shape, generator=draw, dtype=torch.float64)
    weights = (0.1 + torch.rand(len(_LENGTHS), generator=draw, dtype=torch.float64))[sequences]
    advantages = torch.randn(len(_LENGTHS), generator=draw, dtype=torch.float64)
    advantages[list(_WITHOUT_ADVANTAGE)] = 0.0
    return PolicyTokens(
        logprobs=logprobs.to(dtype).requires_grad_(),
        old_logprobs=old.to(dtype),
        rollout_logprobs=rollout.to(dtype),
        advantages=(weights * advantages[sequences]).to(dtype),
        weights=weights.to(dtype),
        sequences=sequences,
        num_sequences=len(_LENGTHS),
    )


def _cases(dtype: torch.dtype) -> list[PolicyTokens]:
    return [_tokens(dtype, gap) for gap in _GAPS]


def _evaluate(term: OwnPolicy, tokens: PolicyTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses [N] by a user's loss ``term``, and the gradient [N] of their sum."""
    logprobs = tokens.logprobs.detach().clone().requires_grad_()
    losses = term(replace(tokens, logprobs=logprobs)).loss
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs, allow_unused=True, materialize_grads=True)
    return losses.detach(), gradient


def _part(tokens: PolicyTokens, chosen: torch.Tensor, *, renumber: bool) -> PolicyTokens:
    """Return a PolicyTokens of the chosen tokens alone.

    chosen: int64, positions of tokens.
    renumber: True numbers the samples of the chosen tokens from 0. False keeps each sample's number.
    """
    sequences, count = tokens.sequences[chosen], tokens.num_sequences
    if renumber:
        present, sequences = torch.unique(sequences, return_inverse=True)
        count = len(present)
    return replace(
        tokens,
        logprobs=tokens.logprobs[chosen].detach(),
        old_logprobs=tokens.old_logprobs[chosen],
        rollout_logprobs=tokens.rollout_logprobs[chosen],
        advantages=tokens.advantages[chosen],
        weights=tokens.weights[chosen],
        sequences=sequences,
        num_sequences=count,
    )


def _largest(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the largest |a − b| / max(1, |b|) over all pairs (a, b); NaN counts as infinite."""
    gaps = [((a - b).abs() / b.abs().clamp(min=1)).nan_to_num(nan=torch.inf).max().item() for a, b in pairs if len(a)]
    return max(gaps, default=0.0)


_ROUNDING = 1e-9  # float64 sums of a few tens of terms, after exp of up to 20


def _finding(name: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, exact: bool = False) -> Finding:
    gap = _largest(pairs)
    return Finding(name=name, holds=gap <= (0.0 if exact else _ROUNDING), detail=f"the largest difference is {gap:.3g}")


def _values(term: OwnPolicy) -> Finding:
    """Return the Finding on shape, type and finiteness of a user's losses and gradient, in float32.

    The loss is also called with a micro-batch of no tokens.
    """
    name = "one finite loss per token, of the tokens' type, with a gradient; none for no token"
    try:
        for tokens in _cases(torch.float32):
            losses, gradient = _evaluate(term, tokens)
            if not (losses.isfinite().all() and gradient.isfinite().all()):
                return Finding(name=name, holds=False, detail="a loss or a gradient is not finite")
            if not gradient.any():
                return Finding(name=name, holds=False, detail="no token has a gradient by tokens.logprobs")
        nothing = _part(tokens, torch.zeros(0, dtype=torch.int64), renumber=False)
        term(nothing)
    except ConfigError as error:
        return Finding(name=name, holds=False, detail=str(error))
    except Exception as error:  # noqa: BLE001  the user's code may raise anything
        return Finding(name=name, holds=False, detail=f"it raised {type(error).__name__}: {error}")
    return Finding(name=name, holds=True, detail=f"{len(_GAPS)} micro-batches of {sum(_LENGTHS)} tokens")


def _unchanged(term: OwnPolicy, cases: Sequence[PolicyTokens]) -> Finding:
    pairs = []
    for tokens in cases:
        inputs = (tokens.old_logprobs, tokens.rollout_logprobs, tokens.advantages, tokens.weights)
        before = [values.clone() for values in inputs]
        pairs += list(zip(_evaluate(term, tokens), _evaluate(term, tokens), strict=True))
        pairs += list(zip(inputs, before, strict=True))
    return _finding("two calls on the same tokens give the same, and change none of them", pairs, exact=True)


def _scales(term: OwnPolicy, cases: Sequence[PolicyTokens]) -> Finding:
    pairs = []
    for tokens in cases:
        scaled = replace(tokens, advantages=4 * tokens.advantages, weights=4 * tokens.weights)
        pairs += [(a, 4 * b) for a, b in zip(_evaluate(term, scaled), _evaluate(term, tokens), strict=True)]
    return _finding(SCALES, pairs)


def _adds(term: OwnPolicy, cases: Sequence[PolicyTokens]) -> Finding:
    pairs = []
    for tokens in cases:
        whole = _evaluate(term, tokens)
        for samples in ((0,), (1, 3, 5), (2, 4), (0, 1, 3, 5)):
            chosen = torch.isin(tokens.sequences, torch.tensor(samples)).nonzero().flatten()
            part = _evaluate(term, _part(tokens, chosen, renumber=True))
            pairs += [(a, b[chosen]) for a, b in zip(part, whole, strict=True)]
    return _finding(ADDS, pairs)


def _splits(term: OwnPolicy, cases: Sequence[PolicyTokens]) -> Finding:
    pairs = []
    for tokens in cases:
        seen: list[torch.Tensor] = []

        def record(sums: torch.Tensor, seen: list[torch.Tensor] = seen) -> torch.Tensor:
            seen.append(sums.detach().clone())
            return sums.detach()

        whole = _evaluate(term, replace(tokens, complete_sums=record))
        for start in (0, 1):
            chosen, waiting = torch.arange(start, len(tokens.sequences), 2), iter(seen)
            completed = replace(tokens, complete_sums=lambda _, waiting=waiting: next(waiting))
            part = _part(completed, chosen, renumber=False)
            pairs += [(a, b[chosen]) for a, b in zip(_evaluate(term, part), whole, strict=True)]
    return _finding(SPLITS, pairs)


def _zero(term: OwnPolicy, cases: Sequence[PolicyTokens]) -> Finding:
    pairs = []
    for tokens in cases:
        without = tokens.advantages == 0
        pairs += [(values[without], torch.zeros_like(values[without])) for values in _evaluate(term, tokens)]
    return _finding(ZERO, pairs, exact=True)

"""Ragged random batches in double precision, and our side of a comparison: loss, gradient, weights, advantages."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from megatron_rl.algorithm.advantage import GroupRewards, advantages, reduction_weights
from megatron_rl.algorithm.importance import importance_weights
from megatron_rl.algorithm.objective import Objective
from megatron_rl.config import CorrectionConfig, LossConfig
from megatron_rl.types import BatchFacts

SEEDS = range(5)  # a batch of its own sizes and numbers each; every clip, cap and mask is met from both sides
DOUBLE = {"rtol": 1e-9, "atol": 1e-12}  # both sides in double, the same operations in another order: 1e-13 was seen


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """S samples of at most T response tokens; tensors are float64 [S, T], any number where no response token stands."""

    groups: np.ndarray  # int64 [S], equally many of each, side by side
    response_tokens: np.ndarray  # int64 [S]
    mask: torch.Tensor  # bool [S, T], loss tokens, with holes
    advantages: np.ndarray  # float64 [S]
    logprobs: torch.Tensor
    old: torch.Tensor  # log π_old
    rollout: torch.Tensor  # log μ
    reference: torch.Tensor  # log π_ref
    entropy: torch.Tensor
    max_response_tokens: int  # above T

    @property
    def loss_tokens(self) -> np.ndarray:
        return self.mask.sum(1).numpy()

    @property
    def present(self) -> int:
        """Return the number of samples with a loss token."""
        return int((self.loss_tokens > 0).sum())

    @property
    def advantage_tensor(self) -> torch.Tensor:
        return torch.from_numpy(self.advantages)

    @property
    def inside(self) -> torch.Tensor:
        """Return where a response token stands, bool [S, T]."""
        return torch.arange(self.mask.shape[1]) < torch.from_numpy(self.response_tokens)[:, None]

    def flat(self, values: torch.Tensor) -> np.ndarray:
        return values[self.inside].numpy()

    def select(self, samples: list[int]) -> Batch:
        rows = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "max_response_tokens"}
        return dataclasses.replace(self, **{name: values[samples] for name, values in rows.items()})

    def change(self, **fields) -> Batch:
        return dataclasses.replace(self, **fields)


def random_batch(seed: int, *, num_empty: int = 0) -> Batch:
    """Draw 2 to 4 groups of 2 to 5 samples of 1 to 9 tokens, a fifth of them masked.

    ``num_empty`` samples have no loss token. π_θ/π_old lies within 0.2 and 5, π_old/μ per token mostly within 0.5 and
    2; one advantage is 0.
    """
    numbers, random = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    size = int(numbers.integers(2, 6))
    count = int(numbers.integers(2, 5)) * size
    lengths = numbers.integers(1, 10, count)
    width = int(lengths.max())
    drawn = (numbers.random((count, width)) < 0.8) & (np.arange(width) < lengths[:, None])
    drawn[np.arange(count), numbers.integers(0, lengths)] = True
    drawn[numbers.permutation(count)[:num_empty]] = False
    values = numbers.normal(size=count)
    values[numbers.integers(count)] = 0.0

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, width, generator=random, dtype=torch.float64)

    old = uniform(-4.0, -0.1)
    return Batch(
        groups=np.repeat(np.arange(count // size), size), response_tokens=lengths, mask=torch.from_numpy(drawn),
        advantages=values, logprobs=old + uniform(-1.6, 1.6), old=old, rollout=old + uniform(-0.8, 0.8),
        reference=old + uniform(-1.0, 1.0), entropy=uniform(0.0, 3.0), max_response_tokens=width + 3,
    )  # fmt: skip


def facts_of(batch: Batch) -> BatchFacts:
    count = len(batch.groups)
    zeros = np.zeros(count, dtype=np.int64)
    return BatchFacts(
        sample_ids=tuple(str(i) for i in range(count)), groups=batch.groups, prompt_tokens=zeros + 1,
        response_tokens=batch.response_tokens, loss_tokens=batch.loss_tokens, owners=zeros,
        owner_rows=np.arange(count),
    )  # fmt: skip


def token_weights(batch: Batch, reduction: str) -> torch.Tensor:
    """Return the weight of each loss token of each sample, [S], with the whole batch counted."""
    every, longest = np.arange(len(batch.groups)), batch.max_response_tokens
    return torch.from_numpy(reduction_weights(reduction, facts_of(batch), every, max_response_tokens=longest))


def correction_weights(batch: Batch, config: CorrectionConfig) -> torch.Tensor:
    """Return importance weights, [S, T], 0 where no loss token stands."""
    decided = np.ones(len(batch.groups), dtype=bool)
    flat = [batch.flat(x) for x in (batch.old, batch.rollout, batch.mask)]
    found = importance_weights(*flat, batch.response_tokens, batch.advantages, decided, config)
    weights = torch.zeros_like(batch.old)
    weights[batch.inside] = torch.from_numpy(found.weights)
    return weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """A loss, and its gradients [S, T] with respect to log-probs and entropies."""

    loss: torch.Tensor
    gradient: torch.Tensor
    entropy_gradient: torch.Tensor


def outcome(batch: Batch, loss_of) -> Outcome:
    """Return the loss and gradients of ``loss_of``: (logprobs, entropy), both [S, T] and with gradient → scalar."""
    logprobs, entropy = batch.logprobs.clone().requires_grad_(), batch.entropy.clone().requires_grad_()
    loss = loss_of(logprobs, entropy)
    gradients = torch.autograd.grad(loss, (logprobs, entropy), allow_unused=True)
    filled = [torch.zeros_like(batch.logprobs) if g is None else g for g in gradients]
    return Outcome(loss=loss.detach(), gradient=filled[0], entropy_gradient=filled[1])


def ours(batch: Batch, config: LossConfig, correction: CorrectionConfig | None = None) -> Outcome:
    """Return our loss of the whole batch as one micro-batch; the advantage holds weights and importance, as packed."""
    weights = token_weights(batch, config.reduction)
    importance = correction_weights(batch, correction or CorrectionConfig())
    owner = torch.arange(len(batch.groups))[:, None].expand_as(batch.mask)[batch.mask]
    tokens = SimpleNamespace(
        num_sequences=len(batch.groups), sequences=owner, weights=weights[owner],
        advantages=(weights * batch.advantage_tensor)[owner] * importance[batch.mask],
        old_logprobs=batch.old[batch.mask], rollout_logprobs=batch.rollout[batch.mask],
        reference_logprobs=batch.reference[batch.mask] if config.kl_coefficient else None, kl_coefficient=None,
        measured=None,
    )  # fmt: skip
    policy = Objective(config).policy
    return outcome(batch, lambda logprobs, entropy: policy(tokens, logprobs[batch.mask], entropy[batch.mask])[0])


def close(found: object, wanted: object, tolerance: dict[str, float] = DOUBLE, **more: bool) -> None:
    torch.testing.assert_close(found, wanted, **tolerance, **more)


def assert_same(found: Outcome, wanted: Outcome) -> None:
    close(found.loss, wanted.loss)
    close(found.gradient, wanted.gradient)
    close(found.entropy_gradient, wanted.entropy_gradient)


def random_rewards(batch: Batch, seed: int, *, num_functions: int = 1) -> np.ndarray:
    """Draw rewards, [S, F], in eighths, exact in float32 too; the first group's are equal, so that it is dead."""
    rewards = np.random.default_rng(seed + 1000).integers(-16, 17, (len(batch.groups), num_functions)) / 8
    rewards[batch.groups == 0] = rewards[0]
    return rewards


def our_advantages(batch: Batch, rewards: np.ndarray, estimator: str, *, function_weights=(), loss_tokens=None,
                   **settings) -> torch.Tensor:
    """Return our advantages, [S], of rewards [S, F], NaN where a function did not apply."""
    totals, included = np.nan_to_num(rewards).sum(1), ~np.isnan(rewards).all(1)  # some function applied
    more = dict(loss_tokens=loss_tokens, by_function=rewards, function_weights=function_weights)
    given = GroupRewards(totals=totals, groups=batch.groups, included=included, **more)
    return torch.from_numpy(advantages(given, estimator=estimator, **settings))


MISSING = "verl, or what it imports, is not installed; `make test-oracles` installs both"
REDUCTIONS = {"token-sum": "token_sum", "token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}
REDUCTIONS |= {"seq-mean-token-sum": "sequence_sum_mean", "seq-mean-token-sum-norm": "sequence_sum_norm"}
# Whitening divides by the root of the variance plus 1e-8, which is 5e-8 of a variance of 0.1.
WHITENED = {"rtol": 1e-7, "atol": 1e-7}

"""Advantages and returns per token (PPO), from rewards and a critic's values per token. Pure functions of numbers.

Every array [T] is flat over the batch's response tokens, sample after sample
(BatchFacts.response_offsets). Time counts **loss tokens alone**: a token that a tool or the
environment wrote is no action of the policy. So the recursion goes from a loss token to the
sample's next loss token. Tokens without loss between them neither discount nor end the sum.

Invariants (``assert_invariants`` in tests/unit/algorithm/test_gae.py):

1. Advantages and returns are exactly 0.0 outside the mask, whatever the rewards and values are (NaN
   too). A sample without a loss token is all 0.
2. No sample's numbers depend on another sample or on its position in the batch. Whitening alone is
   over the batch.
3. Removing the tokens without loss from the batch changes no bit of the numbers at the loss tokens.
4. returns − advantages = values at loss tokens, to rounding.
5. ``gamma=lam=1``: returns are the sums of the rewards from the token on, whatever the values are.
6. ``lam=0``: advantages are one-step errors r_t + γ·V_{t+1} − V_t.
7. A reward, a value, an advantage or a return that is not finite in float32 at a loss token is an
   error that names the sample.
8. ``whiten_tokens``: ``none`` changes nothing, and ``scale`` keeps zeros at 0. No mode reads tokens
   without loss, and each gives them 0.
"""

from __future__ import annotations

import numpy as np

from megatron_rl.algorithm.estimators import whitened
from megatron_rl.algorithm.finite import not_finite, require_epsilon, sample_name
from megatron_rl.algorithm.flat import token_owner
from megatron_rl.errors import NonFiniteAdvantage


def token_rewards(
    totals: np.ndarray, loss_mask: np.ndarray, response_tokens: np.ndarray, token_penalties: np.ndarray | None = None
) -> np.ndarray:
    """Return float64 [T], each token's reward: minus its penalty, plus at a sample's last loss token the total reward.

    totals: [S], the total reward of each sample; may be NaN for a sample without a loss token.
    loss_mask: bool [T], True at loss tokens; the result is 0 elsewhere.
    response_tokens: int64 [S], the number of response tokens of each sample.
    token_penalties: [T], **subtracted**: β·kl_t for a KL in the reward (Ziegler et al. 2019,
                     arXiv:1909.08593, eq. 2). None: no penalty.

    Example: total 1, mask (T, F, T, F), penalties (0.1, 9, 0.2, 9) → (−0.1, 0, 0.8, 0).
    """
    _require_flat(
        response_tokens,
        loss_mask=loss_mask,
        **({} if token_penalties is None else {"token_penalties": token_penalties}),
    )
    positions, counts = _loss_tokens(loss_mask, response_tokens)
    rewards = np.zeros(len(loss_mask))
    if token_penalties is not None:
        rewards[positions] = -np.asarray(token_penalties, dtype=np.float64)[positions]
    trained = counts > 0
    rewards[positions[np.cumsum(counts)[trained] - 1]] += np.asarray(totals, dtype=np.float64)[trained]
    return rewards


def generalised_advantages(
    token_rewards: np.ndarray,
    values: np.ndarray,
    loss_mask: np.ndarray,
    response_tokens: np.ndarray,
    *,
    gamma: float,
    lam: float,
    sample_ids: tuple[str, ...] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Return (advantages [T], returns [T]), float64, by the recursion of GAE over loss tokens.

        δ_t = r_t + γ·V_{t+1} − V_t,   A_t = δ_t + γ·λ·A_{t+1},   R_t = A_t + V_t

    Schulman et al. 2016, arXiv:1506.02438, eq. 16; t + 1 is the sample's next loss token. After the
    last loss token V and A are 0: the episode has ended. A response that was cut off at
    ``rollout.max_response_tokens`` counts as ended too. No value stands in for the rewards that a
    longer response might have earned.

    token_rewards, values: [T], the reward of each token and the critic's value at it.
    loss_mask: bool [T], True at loss tokens.
    response_tokens: int64 [S], the number of response tokens of each sample.
    gamma, lam: γ and λ, in [0, 1].
    sample_ids: S names, for messages alone.

    Raises NonFiniteAdvantage, naming the sample, for a reward, a value or a result at a loss token
    that is not finite or is beyond float32. Raises ValueError if an array's length T is not the sum
    of ``response_tokens``.

    Example: γ = λ = 1, rewards (0, 0, 1), values (0.2, 9, 0.5), mask (T, F, T) → advantages (0.8,
    0, 0.5), returns (1, 0, 1).
    """
    _require_flat(response_tokens, loss_mask=loss_mask, token_rewards=token_rewards, values=values)
    # Loss tokens alone, one after another.
    positions, counts = _loss_tokens(loss_mask, response_tokens)
    rewards = np.asarray(token_rewards, dtype=np.float64)[positions]
    baseline = np.asarray(values, dtype=np.float64)[positions]
    _require_finite(
        rewards,
        counts,
        "reward",
        "mend the reward function, or look at reward.weights, reward.overlong_penalty and the KL in the reward",
        sample_ids,
    )
    _require_finite(baseline, counts, "value", "look for non-finite weights or activations of the critic", sample_ids)
    # One-step errors, with V = 0 after a sample's last loss token, and their discounted sums.
    last = np.cumsum(counts) - 1
    following = np.append(baseline[1:], 0.0) if len(positions) else baseline
    following[last[counts > 0]] = 0.0
    compact = _discounted_sums(rewards + gamma * following - baseline, counts, gamma * lam)
    discounts = f"look at advantage.gamma={gamma:g} and advantage.lam={lam:g}, at its reward and the critic's values"
    for name, numbers in (("advantage", compact), ("return", compact + baseline)):
        _require_finite(numbers, counts, name, discounts, sample_ids)
    # Back to the flat arrays over all response tokens.
    advantages, returns = np.zeros(len(loss_mask)), np.zeros(len(loss_mask))
    advantages[positions] = compact
    returns[positions] = compact + baseline
    return advantages, returns


def whiten_tokens(advantages: np.ndarray, loss_mask: np.ndarray, mode: str, epsilon: float) -> np.ndarray:
    """Return [T] float64: advantages [T] whitened over the batch's loss tokens; 0 at all other tokens.

    The standard deviation is unbiased (n − 1). Fewer than two loss tokens are not whitened.

    mode: ``none`` changes nothing. ``scale``: A / (std + ε), so that zeros stay 0 (semantics §6).
          ``center_and_scale``: (A − mean) / (std + ε), the published form, which moves zeros too.

    Example: (1, −1, 7), mask (T, T, F), ``scale``, ε = 0 → (0.7071, −0.7071, 0).
    """
    require_epsilon("advantage.epsilon", epsilon)
    return whitened(np.where(loss_mask, advantages, 0.0), loss_mask, None, mode, epsilon)


def _loss_tokens(loss_mask: np.ndarray, response_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (positions [L], counts [S]): each loss token's flat index, and each sample's number of loss tokens."""
    owner = token_owner(response_tokens)
    return np.flatnonzero(loss_mask), np.bincount(owner[loss_mask], minlength=len(response_tokens))


def _discounted_sums(terms: np.ndarray, counts: np.ndarray, factor: float) -> np.ndarray:
    """Return float64 [L], for each term t: Σ_k factor^k · terms[t + k], from k = 0 to the last term of t's sample.

    terms: [L], the samples' terms, sample after sample.
    counts: int64 [S], the number of each sample's terms.
    """
    sums = terms.copy()
    order = np.argsort(-counts, kind="stable")
    ends = (np.cumsum(counts) - 1)[order]
    # alive[k]: the number of samples with more than k terms
    alive = len(counts) - np.searchsorted(np.sort(counts), np.arange(counts.max(initial=0)), side="right")
    # Step k computes the sums that start k terms before a sample's last, in all samples of more than k
    # terms at once. Samples are in the order of their lengths, longest first, so these come first.
    for k in range(1, len(alive)):
        positions = ends[: alive[k]] - k
        sums[positions] += factor * sums[positions + 1]
    return sums


def _require_flat(response_tokens: np.ndarray, **arrays: np.ndarray) -> None:
    total = int(np.sum(response_tokens))
    for name, array in arrays.items():
        if np.shape(array) != (total,):
            raise ValueError(
                f"{name} has shape {np.shape(array)}, and response_tokens sum to {total}: it must be flat over them"
            )
    if arrays["loss_mask"].dtype != np.bool_:
        raise ValueError(
            f"loss_mask has dtype {arrays['loss_mask'].dtype}, which NumPy would take as indices; pass a bool array"
        )


def _require_finite(
    numbers: np.ndarray, counts: np.ndarray, name: str, way_out: str, sample_ids: tuple[str, ...]
) -> None:
    bad = np.flatnonzero(not_finite(numbers))
    if len(bad):
        sample = int(np.searchsorted(np.cumsum(counts), bad[0], side="right"))
        raise NonFiniteAdvantage(
            f"the {name} of loss token {bad[0] - int(counts[:sample].sum())} of sample "
            f"{sample_name(sample_ids, sample)} is {numbers[bad[0]]} ({len(bad)} such in the batch), so the loss "
            f"would not be finite; {way_out}"
        )

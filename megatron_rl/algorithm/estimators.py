"""Advantage estimators that compare the samples of a group: pure functions from rewards to one advantage per sample.

The estimator ``gae`` is in algorithm/gae.py. Notation: r_i is the reward of sample i and g its
prompt's group. mean_g and std_g are over the group's included samples, and n_g is their number.
Standard deviations are unbiased (n − 1), as in TRL and verl.

An advantage is exactly 0.0 in three cases:

- the reward equals its group's mean in exact arithmetic, whatever the mean rounds to (invariants 1
  and 7 of algorithm/advantage.py);
- the group has one sample, and so no baseline;
- the sample is not included.

A number that is not finite stays so: algorithm/advantage.py raises the error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# A sum below this share of its largest term is decided in exact arithmetic, in about 1 ms for a group of 16.
CLOSE_TO_ZERO = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupRewards:
    """Holds the inputs of an advantage estimator: the rewards and the groups of a batch's S samples.

    totals:           float64 [S], the total reward of each sample.
    groups:           int64 [S], the index of each sample's prompt; samples of one prompt are a group.
    included:         bool [S], False for a sample that does not count in its group, as after a failed
                      reward. Its total is not read.
    loss_tokens:      int64 [S], the number of tokens with loss, each sample's weight in whitening.
                      None: each sample counts once.
    by_function:      float64 [S, F], each function's reward, NaN for a function that did not apply;
                      read by ``gdpo`` alone. None if not known.
    function_weights: F numbers, the weight of each function; empty: all 1.
    sample_ids:       S names, for messages; empty: messages give the index.

    Example: two groups of two, the last sample taken out: ``totals=[1, 0, 1, nan], groups=[0, 0, 1,
    1], included=[True, True, True, False]``.
    """

    totals: np.ndarray
    groups: np.ndarray
    included: np.ndarray
    loss_tokens: np.ndarray | None = None
    by_function: np.ndarray | None = None
    function_weights: tuple[float, ...] = ()
    sample_ids: tuple[str, ...] = ()


def in_unequal_groups(rewards: GroupRewards) -> np.ndarray:
    """Return [S] bool: whether a sample's group has two included samples of different total rewards."""
    group = np.unique(rewards.groups, return_inverse=True)[1].reshape(-1)
    high, low = np.full(group.max(initial=-1) + 1, -np.inf), np.full(group.max(initial=-1) + 1, np.inf)
    np.maximum.at(high, group[rewards.included], rewards.totals[rewards.included])
    np.minimum.at(low, group[rewards.included], rewards.totals[rewards.included])
    return (high > low)[group]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rewards:
    """Holds one reward of each sample, with its group.

    values: float64 [S], the rewards.
    group: int64 [S], the group of each sample, counted from 0.
    included: bool [S], False for a sample that counts in no mean; its value may be NaN.
    """

    values: np.ndarray
    group: np.ndarray
    included: np.ndarray

    def per_group(self, values: np.ndarray) -> np.ndarray:
        """Return float64 [number of groups], the sum of ``values`` [S] over each group's samples."""
        return np.bincount(self.group, weights=values, minlength=int(self.group.max(initial=-1)) + 1)

    @property
    def counts(self) -> np.ndarray:
        """Return float64 [number of groups], each group's number of included samples."""
        return self.per_group(self.included)


def grpo(rewards: Rewards, *, epsilon: float) -> np.ndarray:
    """Return float64 [S]: A_i = (r_i − mean_g) / (std_g + ε).

    GRPO: DeepSeekMath, arXiv:2402.03300, § 4.1.2, with an ε added to the divisor.

    Example: one group, r = (1, 0, 0, 1), ε = 0 → (0.866, −0.866, −0.866, 0.866).
    """
    centred = dr_grpo(rewards)
    spread = np.sqrt(rewards.per_group(centred**2) / np.maximum(rewards.counts - 1, 1))[rewards.group] + epsilon
    return _divided(centred, spread)


def dr_grpo(rewards: Rewards) -> np.ndarray:
    """Return float64 [S]: A_i = r_i − mean_g.

    Dr. GRPO: Liu et al. 2025, arXiv:2503.20783, § 3.2.

    Examples, of one group: r = (1, 0, 0, 1) → (0.5, −0.5, −0.5, 0.5). r = (1, 1, 1, 1) → exactly
    (0, 0, 0, 0). r = (0, 0.3, 0.6) → (−0.3, 0, 0.3): the mean rounds to 0.3 − 6e-17, but is 0.3 in
    exact arithmetic.
    """
    group, included = rewards.group, rewards.included
    values = np.where(included, rewards.values, 0.0)
    mean = rewards.per_group(values) / np.maximum(rewards.counts, 1)
    high, low = np.full(len(mean), -np.inf), np.full(len(mean), np.inf)
    np.maximum.at(high, group[included], values[included])
    np.minimum.at(low, group[included], values[included])
    centred = np.where(included & (high > low)[group], values - mean[group], 0.0)
    # A mean of n numbers is off by at most n roundings of the largest of them.
    largest = np.zeros(len(mean))
    np.maximum.at(largest, group[included], np.abs(values[included]))
    rounding = rewards.counts * np.finfo(np.float64).eps * largest
    return _without_rounding(rewards, centred, (centred != 0) & (np.abs(centred) <= rounding[group]))


def _without_rounding(rewards: Rewards, centred: np.ndarray, suspects: np.ndarray) -> np.ndarray:
    """Return ``centred`` with 0.0 for those suspects whose reward equals its group's mean, computed in fractions.

    Equality in one of two readings is enough: rewards as the binary numbers that they are, or as the
    decimals that they print as. With (0.2, 0.4, 0.6) the reward function meant the mean 0.4, though
    no binary number is exactly 0.2, 0.4 or 0.6.

    centred: float64 [S], each reward less its group's mean, with rounding.
    suspects: bool [S], True for samples whose ``centred`` may be rounding alone.
    """
    if not suspects.any():
        return centred
    from megatron_rl.algorithm.cancellation import READINGS

    for group in np.unique(rewards.group[suspects]).tolist():
        members = np.flatnonzero(rewards.included & (rewards.group == group))
        for exact in READINGS:
            numbers = [exact(value) for value in rewards.values[members].tolist()]
            total = sum(numbers)
            is_mean = np.array([len(numbers) * number == total for number in numbers])
            centred[members[is_mean & suspects[members]]] = 0.0
    return centred


def _divided(values: np.ndarray, spread: np.ndarray | float) -> np.ndarray:
    """Return ``values`` / ``spread``, with 0 / 0 as 0. Any other number over 0 gives infinity, which callers refuse."""
    with np.errstate(divide="ignore"):
        return np.divide(values, spread, out=np.zeros_like(values), where=values != 0)


def batch_std(rewards: Rewards, *, epsilon: float) -> np.ndarray:
    """Return float64 [S]: A_i = (r_i − mean_g) / (std over the batch of (r_j − mean_g(j)) + ε).

    mean_g is over the sample's group, the standard deviation over the batch's included samples, as
    in Lite PPO (Liu et al. 2025, arXiv:2508.08221) and TRL's ``scale_rewards="batch"``.

    Example: groups (0, 0, 1, 1), r = (1, 0, 3, 3), ε = 0: centred (½, −½, 0, 0), std 0.408 →
    (1.225, −1.225, 0, 0).
    """
    centred = dr_grpo(rewards)
    values = centred[rewards.included]
    spread = (values.std(ddof=1) if len(values) > 1 else 0.0) + epsilon
    return _divided(centred, spread)


def rloo(rewards: Rewards) -> np.ndarray:
    """Return float64 [S]: A_i = r_i − (mean of the group's n_g − 1 other rewards) = (r_i − mean_g) · n_g / (n_g − 1).

    RLOO: Ahmadian et al. 2024, arXiv:2402.14740 (Kool et al. 2019).

    Example: one group, r = (1, 0, 0, 0) → (1, −⅓, −⅓, −⅓).
    """
    count = rewards.counts[rewards.group]
    return np.where(count > 1, dr_grpo(rewards) * count / np.maximum(count - 1, 1), 0.0)


def reinforce_plus_plus(rewards: Rewards, *, tokens: np.ndarray | None, whiten: str, epsilon: float) -> np.ndarray:
    """Return float64 [S]: A_i = whitened(r_i − mean_g), whitened over the batch's loss tokens.

    REINFORCE++ with a baseline: Hu et al. 2025, arXiv:2501.03262.

    tokens, whiten: the arguments ``tokens`` and ``mode`` of ``whitened``.

    Example: one group, r = (1, 0, 0, 1), one token each, ``whiten="scale"``, ε = 0: centred (½, −½,
    −½, ½), σ 0.577 → (0.866, −0.866, −0.866, 0.866).
    """
    return whitened(dr_grpo(rewards), rewards.included, tokens, whiten, epsilon)


def gdpo(
    columns: tuple[Rewards, ...],
    weights: tuple[float, ...],
    included: np.ndarray,
    *,
    tokens: np.ndarray | None,
    whiten: str,
    epsilon: float,
) -> np.ndarray:
    """Return float64 [S]: A_i = whitened(Σ_f w_f · (r_i^f − mean_g^f) / (std_g^f + ε)).

    Each reward function is standardised by itself, so that none drowns another. GDPO: Liu et al.
    2026, arXiv:2601.05242. A sum becomes exactly 0.0 if it is 0 in exact arithmetic, with rewards as
    the binary numbers that they are or as the decimals that they print as (algorithm/cancellation.py).

    columns: one Rewards per function; its ``included`` is True for samples that the function
        applied to.
    weights: w_f, the weight of each function.
    included: bool [S], True for samples that count in the whitening.
    tokens, whiten: the arguments ``tokens`` and ``mode`` of ``whitened``.

    Example: one group of two, functions (1, 0) and (10, 0), weights 1 and 1, ε = 0: both
    standardise to (0.707, −0.707), their sum (1.414, −1.414), ``scale`` → (0.707, −0.707).
    """
    from megatron_rl.algorithm.cancellation import standardised_rewards_cancel

    # The weighted sum, and its largest term for each sample.
    total, largest = np.zeros(len(included)), np.zeros(len(included))
    for column, weight in zip(columns, weights, strict=True):
        term = weight * grpo(column, epsilon=epsilon)
        total += term
        largest = np.maximum(largest, np.abs(term))
    # Sums near 0 are set to 0.0 if they are 0 in exact arithmetic.
    suspects = (total != 0) & (np.abs(total) < CLOSE_TO_ZERO * largest) & np.isfinite(largest)
    for group in np.unique(columns[0].group[suspects]).tolist() if len(columns) > 1 else ():
        members = np.flatnonzero(included & (columns[0].group == group))
        values = [np.where(column.included, column.values, np.nan)[members] for column in columns]
        cancels = standardised_rewards_cancel(values, weights, epsilon)
        total[members[cancels & suspects[members]]] = 0.0
    return whitened(total, included, tokens, whiten, epsilon)


def whitened(
    values: np.ndarray, included: np.ndarray, tokens: np.ndarray | None, mode: str, epsilon: float
) -> np.ndarray:
    """Return float64 [S], ``values`` [S] whitened by mean and standard deviation σ over the batch's loss tokens.

    For mean and σ, each loss token has the value of its sample.

    included: bool [S], False for a sample that does not count in mean and σ.
    tokens: [S], the number of loss tokens of each sample. None: each sample counts as one token.
    mode: ``scale``: values / (σ + ε), so that zeros stay zeros. ``center_and_scale``:
          (values − mean) / (σ + ε). ``none``: the values, unchanged.
    epsilon: ε.
    """
    if mode not in ("none", "scale", "center_and_scale"):
        raise ValueError(f"advantage.whiten={mode!r} is not known; none, scale and center_and_scale are")
    counted = included.astype(np.float64) if tokens is None else np.where(included, tokens, 0).astype(np.float64)
    total = counted.sum()
    if mode == "none" or total <= 1:
        return values
    mean = (counted * values).sum() / total
    spread = np.sqrt((counted * (values - mean) ** 2).sum() / (total - 1)) + epsilon
    if mode == "center_and_scale":
        values = np.where(included, values - mean, 0.0)
    return values if spread == 0 else values / spread

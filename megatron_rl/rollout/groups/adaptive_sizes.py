"""Adaptive group sizes: a prompt whose earlier samples earned different rewards gets many samples, any other few.

The variance of a group's gradient under leave-one-out baselines (RLOO, arXiv:2402.14740) is about
v / (n − 1), where v is the variance of the prompt's rewards and n its number of samples. For a given
total of samples, the sum of these variances is least if n − 1 is in proportion to √v (Neyman 1934).
v is not known. Its estimate comes from the prompt's earlier groups, and leans on the mean of all
prompts as if three more samples had had that variance.

The sizes are decided before the groups are sampled, from earlier groups alone. So each group's
gradient is unbiased whatever the estimate is worth. The loss counts each sample n̄ / n times
(algorithm/advantage.py, ``group_weights``).

Every rank computes the same sizes, since it sees the rewards of all ranks, and sums by ``math.fsum``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_rl.config import RolloutConfig
from megatron_rl.rollout.scored_batch import ScoredBatch
from megatron_rl.types import BatchFacts, Prompt

PRIOR_SAMPLES = 3.0  # the weight of the mean variance of all prompts, in samples
PRIOR_GROUPS = 256  # the mean is over about so many of the latest groups
ROUNDS = 60  # of bisection, which leave a relative error below 1e-15


class AdaptiveSizes:
    """Deals a rollout's samples to its prompts, by the variance of their earlier rewards.

    It is a ``GroupSizes`` (parts.py).

    Example: 2 prompts, ``samples_per_prompt=8``, ``budget=full``, rewards of variance 0.01 and 0.25:
    n − 1 is in proportion to 0.1 and 0.5, so the sizes are 3 and 13.
    """

    def __init__(self, rollout: RolloutConfig) -> None:
        self._mean, self._settings = rollout.samples_per_prompt, rollout.adaptive_groups
        self._bounds = self._settings.min_samples, rollout.largest_group
        # data row → (degrees of freedom, sum of squared deviations) of its groups' rewards, discounted
        self._rows: dict[str, tuple[float, float]] = {}
        self._variances = (0.0, 0.0)  # (weight, weighted sum) of the latest groups' variances
        self._num_known = 0

    def deal(self, prompts: Mapping[int, Prompt]) -> dict[int, int]:
        """Return a group's number in the rollout → its number of samples.

        Their sum is at most ``samples_per_prompt`` for each prompt. While no rewards are known, or all
        known groups had equal rewards, every prompt gets ``samples_per_prompt``.

        prompts: a group's number in the rollout → its prompt, for the groups of all ranks.
        """
        places = sorted(prompts)
        self._num_known = sum(prompts[place].row in self._rows for place in places)
        variances = [self._variance(prompts[place].row) for place in places]
        sizes = dealt(variances, self._mean, *self._bounds, spends_all=self._settings.budget == "full")
        return {place: sizes[index] for index, place in enumerate(places)}

    def _variance(self, row: str) -> float:
        """Return the expected variance of a prompt's rewards: the estimate of its groups, drawn towards the mean."""
        weight, total = self._variances
        mean = total / weight if weight else 0.0
        freedom, squares = self._rows.get(row, (0.0, 0.0))
        return (PRIOR_SAMPLES * mean + squares) / (PRIOR_SAMPLES + freedom)

    def note(self, prompts: Mapping[int, Prompt], scored: ScoredBatch) -> None:
        """Remember the variance of each group's rewards.

        prompts: a group's number in the rollout → its prompt, for the groups of all ranks.
        """
        rewards, keep = scored.rewards, 1 - 1 / PRIOR_GROUPS
        for place in np.unique(scored.facts.groups).tolist():
            values = rewards.totals[(scored.facts.groups == place) & rewards.included].tolist()
            if len(values) < 2:
                continue
            mean = math.fsum(values) / len(values)
            squares, freedom = math.fsum((value - mean) ** 2 for value in values), len(values) - 1
            before = self._rows.get(prompts[place].row, (0.0, 0.0))
            discount = self._settings.memory_discount
            self._rows[prompts[place].row] = (discount * before[0] + freedom, discount * before[1] + squares)
            weight, total = self._variances
            self._variances = (keep * weight + 1, keep * total + squares / freedom)

    def metrics(self, facts: BatchFacts) -> dict[str, float]:
        """Return the mean and extreme sizes of a rollout's groups, and how many dealt prompts were known."""
        sizes = np.unique(facts.groups, return_counts=True)[1]
        return {
            "groups/samples_mean": float(sizes.mean()),
            "groups/samples_min": float(sizes.min()),
            "groups/samples_max": float(sizes.max()),
            "groups/known": float(self._num_known),
        }

    def state(self) -> dict:
        return {"rows": {row: list(pair) for row, pair in self._rows.items()}, "variances": list(self._variances)}

    def load_state(self, state: Mapping) -> None:
        self._rows = {row: (pair[0], pair[1]) for row, pair in state.get("rows", {}).items()}
        self._variances = tuple(state.get("variances", (0.0, 0.0)))


def dealt(variances: Sequence[float], mean: int, least: int, most: int, *, spends_all: bool) -> list[int]:
    """Return the number of samples of each prompt, from ``least`` to ``most``.

    variances: the expected variance v of each prompt's rewards.
    mean: n̄, the number of samples of a prompt if all get the same.
    spends_all: True: the sizes add up to n̄ for each prompt, and the sum of v / (n − 1) is least.
        False: the sum of v / (n − 1) is what it would be at n̄ for each, and the sizes add up to the
        least, rounded up.
    """
    spreads = np.sqrt(np.array(variances, dtype=np.float64))
    if not spreads.any():
        return [mean] * len(spreads)

    def exact(scale: float) -> np.ndarray:
        """Return n − 1 for each prompt."""
        return np.clip(scale * spreads, least - 1, most - 1)

    def enough(scale: float) -> bool:
        free = exact(scale)
        if spends_all:
            return math.fsum(free) >= len(free) * (mean - 1)
        return math.fsum(spreads**2 / free) <= math.fsum(spreads**2) / (mean - 1)

    low = (least - 1) / float(spreads.max())
    high = (most - 1) / float(spreads[spreads > 0].min())
    for _ in range(ROUNDS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return _rounded(exact(high) + 1, len(spreads) * mean, least, most, spends_all=spends_all)


def _rounded(exact: np.ndarray, budget: int, least: int, most: int, *, spends_all: bool) -> list[int]:
    """Return whole numbers near ``exact``, by the largest remainders; their sum is at most ``budget``.

    spends_all: True: the sum is ``budget``. False: it is the sum of ``exact``, rounded up.
    """
    total = budget if spends_all else min(budget, math.ceil(math.fsum(exact) - 1e-9))
    sizes = np.floor(exact + 1e-9).astype(np.int64).clip(least, most)
    order = sorted(range(len(sizes)), key=lambda index: (sizes[index] - exact[index], index))
    left = total - int(sizes.sum())
    while left > 0:
        for index in order:
            if left > 0 and sizes[index] < most:
                sizes[index] += 1
                left -= 1
    return sizes.tolist()

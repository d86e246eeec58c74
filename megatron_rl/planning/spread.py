"""The distribution of samples over bins of near-equal cost: data-parallel ranks, then micro-batches. Pure numpy.

Samples of one prompt (a group) that are in one bin run their prompt once (planning/tokens.py). If a
group is split over two bins, its prompt runs twice. Several distributions are tried: first with
whole groups, then with ever smaller parts of groups, and last without regard to groups. Each is
taken only if its costliest bin, repeated prompts included, costs over 1 % less than in the best
distribution before it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from megatron_rl.planning.cost import CostModel
from megatron_rl.planning.tokens import SampleTokens

LEAST_GAIN = 0.01  # share of the costliest bin's cost that a finer cut must save to be taken
ROUNDING = 1e-9  # relative rounding error of a quotient of costs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleCosts:
    """Holds the numbers of tokens, pads included, and the costs of S samples.

    own: float64 [S], the cost of each sample's own tokens.
    prompt: float64 [S], the cost of each sample's shared prompt, 0 if none is shared.
    """

    tokens: SampleTokens
    own: np.ndarray
    prompt: np.ndarray

    @classmethod
    def of(cls, tokens: SampleTokens, model: CostModel) -> SampleCosts:
        own, prompt = model.sample_costs(tokens)
        return cls(tokens=tokens, own=own, prompt=prompt)

    def total(self, samples: np.ndarray) -> float:
        """Return the cost of the samples, int64 indices, in one bin, with each shared prompt counted once."""
        cost = float(self.own[samples].sum())
        if self.tokens.prompt[samples].any():
            first = np.unique(self.tokens.group[samples], return_index=True)[1]
            cost += float(self.prompt[samples[first]].sum())
        return cost

    def alone(self) -> np.ndarray:
        """Return float64 [S], the cost of each sample by itself."""
        return self.own + self.prompt

    def groups(self, samples: np.ndarray) -> list[np.ndarray]:
        """Return ``samples`` divided by prompt: for each prompt an int64 array of its samples' indices, ascending."""
        ordered = samples[np.lexsort((samples, self.tokens.group[samples]))]
        return np.split(ordered, np.flatnonzero(np.diff(self.tokens.group[ordered])) + 1)


def balance(samples: np.ndarray, cost: np.ndarray, bins: int) -> list[np.ndarray]:
    """Return ``bins`` arrays of samples of near-equal cost: the costliest first, each into the cheapest bin (LPT).

    LPT is the longest-processing-time rule. Of bins of equal cost, the one with fewer samples takes
    the next sample. So no bin is empty if there are enough samples, even if some samples cost 0. Each
    bin is in index order.

    samples: int64, indices of samples.
    cost: float64 [S], the cost of each sample.
    """
    if bins == 1:
        return [np.sort(samples)]
    by_cost = samples[np.lexsort((samples, -cost[samples]))]
    loads = [(0.0, 0, b) for b in range(bins)]
    chosen = np.empty(len(by_cost), dtype=np.int64)
    for i, sample_cost in enumerate(cost[by_cost].tolist()):
        load, count, b = loads[0]
        chosen[i] = b
        heapq.heapreplace(loads, (load + sample_cost, count + 1, b))
    order = np.lexsort((by_cost, chosen))
    return np.split(by_cost[order], np.searchsorted(chosen[order], np.arange(1, bins)))


def spread(samples: np.ndarray, costs: SampleCosts, bins: int, max_tokens: float = np.inf) -> list[np.ndarray]:
    """Return ``bins`` arrays of sample indices, of near-equal cost; some are empty if samples are few.

    Each array is in index order. A group is the samples of one prompt. It is split only if that
    saves over 1 % of the costliest bin's cost, or if it has more than ``max_tokens``.

    samples: int64, indices of samples.
    max_tokens: the most tokens of one group in a bin. A bin of several groups may have more.
    """
    # Without shared prompts, one greedy pass.
    if bins == 1 or len(samples) == 0 or not costs.tokens.shares:
        return balance(samples, costs.alone(), bins)
    # With them, ever finer cuts of the groups, until a cut gains too little.
    groups = costs.groups(samples)
    grain = max(costs.total(group) for group in groups)
    best, least, last = [], np.inf, np.inf
    for _ in range(int(np.ceil(np.log2(max(map(len, groups))))) + 1):
        found = _place([x for group in groups for x in _cut(group, costs, grain, max_tokens)], costs, bins)
        most = _costliest(found, costs)
        if most < least * (1 - LEAST_GAIN):
            best, least = found, most
        if most > last * (1 - LEAST_GAIN):
            break
        last, grain = most, grain / 2
    # The spread that ignores groups, if it is better.
    plain = balance(samples, costs.alone(), bins)
    return plain if _costliest(plain, costs) < least * (1 - LEAST_GAIN) else best


def split_to(bins: list[np.ndarray], count: int, costs: SampleCosts) -> list[np.ndarray]:
    """Return at least ``count`` bins, none empty, by halving the bins that have the most samples.

    If there are fewer than ``count`` samples, each bin has one.

    bins: int64 arrays of sample indices.
    """
    pieces = [x for x in bins if len(x)]
    while len(pieces) < count and max(map(len, pieces), default=0) > 1:
        number = max(range(len(pieces)), key=lambda i: (len(pieces[i]), -i))
        halves = [x for x in spread(pieces[number], costs, 2) if len(x)]
        pieces[number : number + 1] = halves if len(halves) > 1 else balance(pieces[number], costs.own, 2)
    return pieces


def _costliest(bins: list[np.ndarray], costs: SampleCosts) -> float:
    return max(costs.total(samples) for samples in bins)


def _cut(group: np.ndarray, costs: SampleCosts, grain: float, max_tokens: float) -> list[np.ndarray]:
    """Return a group's samples in parts of near-equal cost, as few as the two limits allow.

    group: int64, indices of samples with one prompt.
    grain, max_tokens: the largest cost and the largest number of tokens of a part, its prompt
        included. A part of one sample may exceed both.
    """
    prompt, own = float(costs.prompt[group[0]]), float(costs.own[group].sum())
    room, tokens = grain - prompt, costs.tokens
    pieces = len(group) if room <= 0 else int(np.ceil(own / room * (1 - ROUNDING)))
    left = max_tokens - float(tokens.prompt[group[0]])
    if np.isfinite(left):
        pieces = max(pieces, len(group) if left <= 0 else int(np.ceil(tokens.own[group].sum() / left)))
    while True:
        pieces = min(max(pieces, 1), len(group))
        parts = balance(group, costs.own, pieces)
        if pieces == len(group) or all(len(x) == 1 or tokens.own[x].sum() <= left for x in parts):
            return [x for x in parts if len(x)]
        pieces += 1


def _place(parts: list[np.ndarray], costs: SampleCosts, bins: int) -> list[np.ndarray]:
    """Return ``bins`` arrays of samples: each part, costliest first, goes into the bin whose cost is then the least.

    A bin that holds a part of the same group already does not pay for the prompt again.

    parts: int64 arrays of sample indices, each of one group.
    """
    own = np.array([costs.own[part].sum() for part in parts])
    prompt = np.array([costs.prompt[part[0]] for part in parts])
    group = [int(costs.tokens.group[part[0]]) for part in parts]
    loads, homes = np.zeros(bins), {}
    chosen: list[list[np.ndarray]] = [[] for _ in range(bins)]
    for i in np.lexsort(([int(part[0]) for part in parts], -(own + prompt))).tolist():
        after = loads + own[i] + prompt[i]
        home = homes.setdefault(group[i], [])
        after[home] -= prompt[i]
        b = int(after.argmin())
        loads[b] = after[b]
        if b not in home:
            home.append(b)
        chosen[b].append(parts[i])
    return [np.sort(np.concatenate(x)) if x else np.empty(0, dtype=np.int64) for x in chosen]

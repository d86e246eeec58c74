"""The replay buffer: decides which groups are kept for replay, which of them are drawn, and which are dropped.

The buffer holds one ``Entry`` per group: a key, a score and a weight version, no tokens.
``GroupReplay`` holds the groups by these keys, and drops a group once the buffer has removed its
entry. Every rank holds the same buffer and takes the same decisions. Draws only compare, add and
divide scores, so a difference between math libraries cannot make two ranks draw differently.

Invariants (``assert_invariants`` in tests/unit/rollout/test_replay_buffer.py):

1. The buffer holds at most ``replay.capacity_groups`` entries, one per key, each with a finite
   score above 0. Entries are sorted by score (highest first), then by weight version (newest
   first), then by key (ascending). Of the held and the new entries, ``add`` keeps the first in this
   order.
2. No key is lost or doubled. After a call, each key that was held or added is either held, or
   returned as removed, exactly once.
3. A draw returns distinct keys that are held, not excluded and not used up. It returns as many as
   requested, or all of them if there are fewer. It increases the number of uses of each drawn key
   by 1, and changes nothing else.
4. A draw depends only on the seed, the rollout's number and the held entries. The chance of a key
   to be drawn next is its score divided by the sum of the scores of all keys that are still to be
   drawn.
5. Age is counted in weight versions. After ``expire(v)`` no entry is older than
   ``replay.max_age_versions`` at version v. After ``retire`` no entry is used up.
6. A buffer that is restored from a state that went through JSON behaves like the saved buffer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from megatron_rl.config import ReplayConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Holds the score, the weight version and the number of uses of one group that may be trained again.

    key: the group's ``Prompt.name``, under which ``GroupReplay`` holds the group.
    score: the group's score (``group_scores``). The chance to be drawn is proportional to it.
    version: the version of the oldest weights that sampled any of the group's tokens.
    uses: how often the group was drawn.

    Raises ValueError for a score that is not finite, or is below 0.

    Example: ``Entry(key="17@0", score=2.0, version=3)``. At weight version 19 the entry is 16
    versions old.
    """

    key: str
    score: float
    version: int
    uses: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.score) and self.score >= 0):
            raise ValueError(
                f"the replay score of group {self.key} is {self.score}, and must be finite and at least 0: a reward "
                "or an advantage of it is out of range; mend the reward function"
            )


def group_scores(
    advantages: np.ndarray, groups: np.ndarray, included: np.ndarray, rewards_by_function: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of P groups: (group numbers, int64 [P], sorted; scores, float64 [P]).

        score = (Σ_i |A_i|) · (Σ_f std_f)

    over the group's included samples i and the reward functions f. A_i is the advantage of sample
    i. std_f is the standard deviation (divisor n − 1) of function f's rewards for the n included
    samples to which f applied. std_f is exactly 0 if n < 2 or if the rewards are equal. If an
    advantage or a reward is not finite, the score is not finite either. ``Entry`` then raises an
    error that names the group.

    advantages: [S], one per sample.
    groups: int64 [S], each sample's group number.
    included: bool [S]; samples that are not included are ignored.
    rewards_by_function: [S, F], the rewards by F functions; NaN if a function did not apply.

    Example: a group with rewards (1, 0) and advantages (0.5, −0.5) has 1.0 · 0.7071 = 0.7071. A
    group with rewards (1, 1) has 0.
    """
    numbers, index = np.unique(groups, return_inverse=True)
    index, size = index.reshape(-1), len(numbers)
    absolute = np.bincount(index, weights=np.where(included, np.abs(advantages), 0.0), minlength=size)
    spreads = np.zeros(size)
    with np.errstate(invalid="ignore", over="ignore"):
        for column in rewards_by_function.T:
            spreads += _spreads(column, index, included & ~np.isnan(column), size)
        return numbers.astype(np.int64), absolute * spreads


def _spreads(values: np.ndarray, index: np.ndarray, applied: np.ndarray, size: int) -> np.ndarray:
    """Return float64 [P], the standard deviation (divisor n − 1) of one function's rewards in each of P groups.

    It is exactly 0 for a group whose rewards are finite and equal, and for a group with fewer than
    two rewards.

    values: [S], the function's reward for each sample.
    index: [S], each sample's group, from 0 to P − 1.
    applied: bool [S], whether a sample's reward counts.
    size: P, the number of groups.
    """
    index, values = index[applied], values[applied]
    count = np.bincount(index, minlength=size)
    mean = np.bincount(index, weights=values, minlength=size) / np.maximum(count, 1)
    high, low = np.full(size, -np.inf), np.full(size, np.inf)
    np.maximum.at(high, index, values)
    np.minimum.at(low, index, values)
    squares = np.bincount(index, weights=(values - mean[index]) ** 2, minlength=size)
    # Equal values have spread 0, whatever the rounding of their mean. Infinite values never count as
    # equal, so that their spread is NaN.
    return np.where((high > low) | np.isinf(high), np.sqrt(squares / np.maximum(count - 1, 1)), 0.0)


class ReplayBuffer:
    """Holds an ``Entry`` for each group that is kept for replay.

    ``add`` keeps the entries with the highest scores, and returns the keys of the others. The
    chance of a key to be drawn is proportional to its score.

    seed: the run's seed. Draws are derived from it and the rollout's number.

    Example: with ``capacity_groups=2``, adding a (score 1), b (3) and c (2) returns ``["a"]``, which
    is not kept. Then ``draw(count=1, rollout=5)`` returns ``["b"]`` for three of five seeds on
    average, else ``["c"]``. With ``max_uses=1``, ``retire()`` then removes and returns the drawn key.
    """

    def __init__(self, config: ReplayConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Return the entries, the highest score first."""
        return tuple(self._entries)

    def add(self, entries: Iterable[Entry]) -> list[str]:
        """Keep the ``replay.capacity_groups`` best of the held and the new entries; return the keys of the others.

        The best entries have the highest scores. The caller may drop the groups of the returned
        keys. If a key is already held, or is added twice, the later entry replaces the earlier
        entry. An entry with score 0 is never kept.
        """
        latest = {entry.key: entry for entry in (*self._entries, *entries)}
        ranked = sorted(latest.values(), key=lambda entry: (-entry.score, -entry.version, entry.key))
        kept = [entry for entry in ranked if entry.score > 0][: self._config.capacity_groups]
        self._entries = kept
        return [entry.key for entry in ranked[len(kept) :]]

    def draw(self, count: int, *, rollout: int, exclude: Collection[str] = ()) -> list[str]:
        """Return up to ``count`` distinct keys, drawn at random in proportion to score; count a use of each.

        rollout: the rollout's number. The same number draws the same keys, so a second draw for a
            rollout must exclude the keys of the first.
        exclude: keys of groups that are already in the batch.

        An entry that was used ``replay.max_uses`` times is not drawn, even if ``retire`` has not
        removed it yet.
        """
        assert count >= 0, f"count={count} groups to draw"
        barred = set(exclude)
        left = [entry for entry in self._entries if entry.key not in barred and entry.uses < self._config.max_uses]
        scores = np.array([entry.score for entry in left], dtype=np.float64)
        drawn: list[str] = []
        for uniform in _uniforms(self._seed, rollout, min(count, len(left))):
            # Scores are divided by the largest, so that no sum overflows. A score that underflows then
            # can be drawn once the larger scores are gone.
            ends = np.cumsum(scores / scores.max())
            position = int(np.searchsorted(ends, uniform * ends[-1], side="right"))
            drawn.append(left.pop(position).key)
            scores = np.delete(scores, position)
        used = set(drawn)
        self._entries = [dataclasses.replace(x, uses=x.uses + 1) if x.key in used else x for x in self._entries]
        return drawn

    def expire(self, version: int) -> list[str]:
        """Remove the entries more than ``replay.max_age_versions`` versions older than ``version``; return their keys.

        version: the current version of the trainer's weights.
        """
        limit = self._config.max_age_versions
        return [] if limit is None else self._remove(lambda entry: version - entry.version > limit)

    def retire(self) -> list[str]:
        """Remove the entries that were used ``replay.max_uses`` times; return their keys.

        Call it after the drawn groups were trained.
        """
        return self._remove(lambda entry: entry.uses >= self._config.max_uses)

    def _remove(self, goes: Callable[[Entry], bool]) -> list[str]:
        gone = [entry.key for entry in self._entries if goes(entry)]
        self._entries = [entry for entry in self._entries if not goes(entry)]
        return gone

    def state(self) -> dict:
        """Return the entries as JSON-able values."""
        return {
            "entries": [
                {"key": entry.key, "score": float(entry.score), "version": int(entry.version), "uses": int(entry.uses)}
                for entry in self._entries
            ]
        }

    def load_state(self, state: Mapping) -> list[str]:
        """Replace all entries by saved ones; return the saved keys for which the buffer has no room.

        The room is this run's ``replay.capacity_groups``.
        """
        loaded = [Entry(**entry) for entry in state["entries"]]
        assert len({entry.key for entry in loaded}) == len(loaded), "a key stands twice in the saved replay buffer"
        self._entries = []
        return self.add(loaded)


def _uniforms(seed: int, rollout: int, count: int) -> list[float]:
    """Return ``count`` random numbers in [0, 1), which depend only on the seed and the rollout's number."""
    key = np.array([seed % 2**64, rollout], dtype=np.uint64)
    counter = np.array([0, 0, 0, 1], dtype=np.uint64)  # the prompts' order uses the same keys with counters from 0
    # random_raw, not Generator.random: NumPy keeps only the streams of bit generators fixed across versions (NEP 19).
    return ((np.random.Philox(key=key, counter=counter).random_raw(count) >> np.uint64(11)) * 2.0**-53).tolist()

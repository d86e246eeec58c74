"""The replay buffer: keeps the groups with the most signal, draws some to be trained again, and drops the others.

Pure: numbers in, decisions out. Every rank holds the same buffer of facts and takes the same
decisions; the rows (tokens) are held elsewhere, by key, and are dropped when this buffer returns
their key as gone. Scores are compared, added and divided, no more: no library's logarithm decides a
rank's draw.

Invariants (``assert_invariants`` in tests/unit/rollout/test_replay_buffer.py):

1. The buffer holds at most ``replay.capacity_groups`` entries, one per key, every score finite and
   above 0, the best first: the higher score, then the newer weights, then the smaller key. ``add``
   keeps the best of the entries that it had and was given.
2. No key is lost or doubled: each key that was held or came in is afterwards either held or
   returned as gone, once.
3. A draw gives distinct keys that are held, not excluded and not used up, as many as were asked for
   or all of them, and counts each as used once more; it changes nothing else.
4. A draw depends on (seed, rollout, the entries held) alone. The chance of each next key is its
   score over the sum of the scores still to be drawn.
5. Age is counted in weight versions: after ``expire(v)`` no entry is older than
   ``replay.max_age_versions`` at version v; after ``retire`` none is used up.
6. A state that went through JSON and back has the same future.
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
    """Describes one group that may be trained again.

    key:     the group's ``Prompt.name``; its rows are held under it.
    score:   its signal, see `group_scores`; a draw is in proportion to it.
    version: the oldest weights that any of its tokens comes from.
    uses:    how often it was drawn.

    Raises ValueError for a score that is not a finite number, or is below 0.

    Example: ``Entry(key="17@0", score=2.0, version=3)``; at version 19 it is 16 versions old.
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
    """Return the signal of each group: (group numbers, int64 [P], sorted; scores, float64 [P]).

    score = Σ over its samples of |A| · Σ_f std_f, the unbiased standard deviation (n − 1) of reward
    function f over the group's included samples where f applied; 0 where those are fewer than two,
    and exactly 0 where they are equal as numbers. It is not finite where an advantage or a reward
    is not; `Entry` refuses it by its key.

    advantages: [S], of each sample.
    groups: int64 [S], each sample's group number.
    included: bool [S]; a sample that is not included counts nothing.
    rewards_by_function: [S, F], NaN where a function did not apply.

    Example: a group with rewards (1, 0) and advantages (0.5, −0.5): 1.0 · 0.7071 = 0.7071; one with
    rewards (1, 1): 0.
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
    """Return [P], the unbiased standard deviation of each group's ``applied`` values; exactly 0 for equal values."""
    index, values = index[applied], values[applied]
    count = np.bincount(index, minlength=size)
    mean = np.bincount(index, weights=values, minlength=size) / np.maximum(count, 1)
    high, low = np.full(size, -np.inf), np.full(size, np.inf)
    np.maximum.at(high, index, values)
    np.minimum.at(low, index, values)
    squares = np.bincount(index, weights=(values - mean[index]) ** 2, minlength=size)
    # Equal values have no spread, whatever the rounding of their mean. Infinite ones do not count
    # as equal: NaN.
    return np.where((high > low) | np.isinf(high), np.sqrt(squares / np.maximum(count - 1, 1)), 0.0)


class ReplayBuffer:
    """Holds the facts of the groups with the most signal. No method depends on the order in which entries came in.

    seed: the run's; draws derive from it and the rollout's number.

    Example: ``size=2``; adding a (score 1), b (3) and c (2) returns ``["a"]``; ``draw(1,
    rollout=5)`` returns ``["b"]`` three times out of five over the seeds, else ``["c"]``; with
    ``max_uses=1``, ``retire()`` then returns the same key.
    """

    def __init__(self, config: ReplayConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Return the entries, the best first."""
        return tuple(self._entries)

    def add(self, entries: Iterable[Entry]) -> list[str]:
        """Keep the ``replay.capacity_groups`` best of the held and the new entries; return the keys that are not held.

        The rows of these keys may be dropped. A key that is held already, or comes twice, is
        replaced by the later entry, as its rows are. A score of 0 is never kept.
        """
        latest = {entry.key: entry for entry in (*self._entries, *entries)}
        ranked = sorted(latest.values(), key=lambda entry: (-entry.score, -entry.version, entry.key))
        kept = [entry for entry in ranked if entry.score > 0][: self._config.capacity_groups]
        self._entries = kept
        return [entry.key for entry in ranked[len(kept) :]]

    def draw(self, count: int, *, rollout: int, exclude: Collection[str] = ()) -> list[str]:
        """Draw up to ``count`` distinct keys, without replacement, in proportion to score; each counts as used.

        rollout: the batch's number; the same number draws the same, so a second draw for a batch
            must exclude the keys of the first.
        exclude: keys of groups that the batch has itself.

        An entry that was used ``replay.max_uses`` times is not drawn, retired or not.
        """
        assert count >= 0, f"count={count} groups to draw"
        barred = set(exclude)
        left = [entry for entry in self._entries if entry.key not in barred and entry.uses < self._config.max_uses]
        scores = np.array([entry.score for entry in left], dtype=np.float64)
        drawn: list[str] = []
        for uniform in _uniforms(self._seed, rollout, min(count, len(left))):
            # Divided by the largest, so that no sum overflows; a score that underflows beside it
            # can be drawn when the larger ones are gone.
            ends = np.cumsum(scores / scores.max())
            position = int(np.searchsorted(ends, uniform * ends[-1], side="right"))
            drawn.append(left.pop(position).key)
            scores = np.delete(scores, position)
        used = set(drawn)
        self._entries = [dataclasses.replace(x, uses=x.uses + 1) if x.key in used else x for x in self._entries]
        return drawn

    def expire(self, version: int) -> list[str]:
        """Remove the entries older than ``replay.max_age_versions`` at weights ``version``; return their keys."""
        limit = self._config.max_age_versions
        return [] if limit is None else self._remove(lambda entry: version - entry.version > limit)

    def retire(self) -> list[str]:
        """Remove the entries used ``replay.max_uses`` times, after the step that used them; return their keys."""
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
        """Replace all entries by saved ones; return the saved keys beyond a smaller ``replay.capacity_groups``."""
        loaded = [Entry(**entry) for entry in state["entries"]]
        assert len({entry.key for entry in loaded}) == len(loaded), "a key stands twice in the saved replay buffer"
        self._entries = []
        return self.add(loaded)


def _uniforms(seed: int, rollout: int, count: int) -> list[float]:
    """Return ``count`` numbers in [0, 1) that derive from the seed and the rollout's number."""
    key = np.array([seed % 2**64, rollout], dtype=np.uint64)
    counter = np.array([0, 0, 0, 1], dtype=np.uint64)  # the prompts' order uses the same keys, counted from 0
    # random_raw, not Generator.random: NumPy keeps bit generators' streams fixed across versions (NEP 19).
    return ((np.random.Philox(key=key, counter=counter).random_raw(count) >> np.uint64(11)) * 2.0**-53).tolist()

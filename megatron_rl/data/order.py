"""The order in which rows are drawn, epoch after epoch: a permutation of all rows, or a mixture of several sources.

The order depends on seed and position alone: every rank, every parallel layout and every resumed
run draws the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np


class Order:
    """Gives the row at every position of an endless sequence of epochs.

    An epoch has as many positions as all sources together have rows. In a mixture each source gets
    its fraction of the positions (by largest remainder). A source's positions are spread evenly, so
    that any stretch of an epoch holds the sources in nearly these fractions.

    A source goes through its rows, permutation after permutation, without regard to the ends of
    epochs. So a row comes again only after all rows of its source came equally often.

    sources: int64 arrays, the row numbers of each source, in file order.
    weights: the relative number of draws from each source. Empty: all sources are one, and an epoch
        draws each row once.

    Example: sources of 2 and 4 rows, weights 1 and 1. An epoch of 6 draws 3 rows of each, in turns.
    In two epochs each row of the first source comes 3 times, each row of the second 1 or 2 times.
    """

    def __init__(self, sources: Sequence[np.ndarray], weights: Sequence[float], *, seed: int, shuffle: bool) -> None:
        self._sources = list(sources) if weights else [np.concatenate(list(sources))]
        self._seed, self._shuffle = seed, shuffle
        self._length = sum(map(len, sources))
        self.counts = shares(weights, self._length) if weights else [self._length]
        # Draw j of a source's c draws comes at (j + 1/2)/c of the epoch; of equal times the first source is first.
        source = np.repeat(np.arange(len(self.counts)), self.counts)
        index = np.concatenate([np.arange(count) for count in self.counts])
        places = np.lexsort((source, (index + 0.5) / np.repeat(self.counts, self.counts)))
        self._source_at, self._index_at = source[places], index[places]
        self._permutations: dict[int, tuple[int, np.ndarray]] = {}

    def __len__(self) -> int:
        """Return the number of positions of an epoch."""
        return self._length

    def at(self, position: int) -> tuple[int, int]:
        """Return (row, rounds) at a position: the row, and how many times all rows of its source came before."""
        epoch, offset = divmod(position, self._length)
        source = int(self._source_at[offset])
        drawn = epoch * self.counts[source] + int(self._index_at[offset])
        rounds, place = divmod(drawn, len(self._sources[source]))
        return int(self._permutation(source, rounds)[place]), rounds

    def identity(self) -> dict[str, object]:
        """Return what fixes a mixture's order: {"sources": [[rows, draws per epoch], ...]}; {} for a single source.

        Each pair holds a source's number of rows, and how many of its rows an epoch draws.
        """
        if len(self._sources) == 1:
            return {}
        return {"sources": [list(pair) for pair in zip(map(len, self._sources), self.counts, strict=True)]}

    def _permutation(self, source: int, rounds: int) -> np.ndarray:
        if not self._shuffle:
            return self._sources[source]
        if source not in self._permutations or self._permutations[source][0] != rounds:
            # A key, not a SeedSequence: it takes any integer seed, and no two (seed, source, round)
            # share a stream.
            key = np.array([self._seed % 2**64, (source << 48) + rounds], dtype=np.uint64)
            permutation = np.random.Generator(np.random.Philox(key=key)).permutation(self._sources[source])
            self._permutations[source] = (rounds, permutation)
        return self._permutations[source][1]


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Return whole numbers with the sum ``total`` that are nearest to the weights' fractions of it (largest remainder).

    Example: weights (3, 1), total 6: 4.5 and 1.5 have equal remainders, so the first is rounded up:
    [5, 1].
    """
    exact = [Fraction(weight) * total / sum(map(Fraction, weights)) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: (counts[source] - exact[source], source))
    for source in by_remainder[: total - sum(counts)]:
        counts[source] += 1
    return counts

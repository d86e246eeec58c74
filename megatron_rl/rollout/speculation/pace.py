"""The choice whether a batch drafts, and how many tokens in a pass, by measured seconds and accepted drafts.

The clock decides the number of drafted tokens alone, never which token a sample gets.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

log = logging.getLogger(__name__)
WIDTHS = (0, 1, 2, 4, 8)  # drafted tokens of each row (sample) in a pass, at most
TRIALS = 2  # of each width, for each size of a batch; the first pass of a shape is often a slow one
FASTER, SLOWER = 1.0, 0.1  # weight of a pass in the mean of its seconds; a busy host makes some passes slow
KEPT = 0.98  # of the counts of drafts, from one pass to the next
HOPE, WEIGHT = 0.8, 1.0  # the share of drafts that is taken to hold before any was tried, and its weight in drafts
PLAIN = 20  # passes with drafts after which one is without, to know what that takes now
RETRY = 100  # passes after which another width is tried
AGAIN = 16  # batches of a kind, of which one is decoded the slower way


class Pace(Protocol):
    """Decides how many tokens are drafted."""

    def width(self, num_rows: int) -> int:
        """Return the most tokens to draft for each of ``num_rows`` rows in the next pass."""
        ...

    def note(self, asked: int, seconds: float, drafts: Sequence[tuple[int, int]]) -> None:
        """Take a pass into account.

        asked: the result of ``width`` for the pass.
        seconds: of the pass, the drafting and the draws.
        drafts: (drafted, accepted) tokens of each row.
        """
        ...


class MeasuredPace:
    """Drafts as many tokens as give the most tokens a second, by the passes so far.

    Passes are counted apart for batches of 1, 2 to 3, 4 to 7, ... rows. Rarely the width that was not
    measured for the longest time is tried again.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], float] = {}  # (size of the batch, width) → mean seconds of a pass
        self._trials: dict[tuple[int, int], int] = {}  # (size of the batch, width) → passes that it was asked for
        self._last: dict[tuple[int, int], int] = {}  # (size of the batch, width) → the latest of them
        self._passes = 0
        # By place in a draft: rows of which all tokens before it were accepted, whether they had a token there or
        # not, and those of which it was accepted too.
        self._offered, self._held = [0.0] * WIDTHS[-1], [0.0] * WIDTHS[-1]
        self._since: dict[int, int] = {}  # size of the batch → passes since a width was tried again

    def width(self, num_rows: int) -> int:
        size = num_rows.bit_length()
        if (untried := self._untried(size)) is not None:
            return untried
        if self._since.get(size, 0) >= RETRY:
            return min(WIDTHS, key=lambda width: self._last.get((size, width), 0))
        return 0 if self._passes - self._last[size, 0] >= PLAIN else self._best(size)

    def note(self, asked: int, seconds: float, drafts: Sequence[tuple[int, int]]) -> None:
        size, drafted = len(drafts).bit_length(), max(drafted for drafted, _ in drafts)
        width = next(width for width in WIDTHS if width >= drafted)
        mean = self._seconds.get((size, width), seconds)
        self._seconds[size, width] = mean + (FASTER if seconds < mean else SLOWER) * (seconds - mean)
        self._passes += 1
        self._since[size] = self._since.get(size, 0) + 1
        if drafted:
            self._count(asked, drafts)
        if drafted or not asked:  # a pass for which nothing could be drafted tells nothing of the width
            self._trials[size, asked] = self._trials.get((size, asked), 0) + 1
            self._last[size, asked] = self._passes
        if self._untried(size) is not None:
            return
        if self._since[size] > RETRY and (drafted or not asked):
            self._since[size] = 0

    def _untried(self, size: int) -> int | None:
        """Return a width that was tried too seldom for this size of a batch; None if there is none.

        A width is left out if it could not pay even if its pass took no longer than the pass of the width below.
        """
        for below, width in zip((0, *WIDTHS), WIDTHS, strict=False):
            if self._trials.get((size, width), 0) >= TRIALS:
                continue
            seconds = self._seconds.get((size, below))
            if width > 1 and seconds and self._tokens(width) / seconds <= 1 / self._seconds[size, 0]:
                return None
            return width
        return None

    def _count(self, asked: int, drafts: Sequence[tuple[int, int]]) -> None:
        """Count which places of the rows' drafts were reached and accepted. Older counts fade."""
        for place in range(WIDTHS[-1]):
            is_asked = place < asked
            offered = sum(place <= accepted for _, accepted in drafts) if is_asked else 0
            held = sum(place < accepted for _, accepted in drafts) if is_asked else 0
            self._offered[place] = KEPT * self._offered[place] + offered
            self._held[place] = KEPT * self._held[place] + held

    def _tokens(self, width: int) -> float:
        """Return the expected tokens of a row in a pass with at most ``width`` drafted ones."""
        tokens, chance, share = 1.0, 1.0, HOPE
        for place in range(width):
            # A place that was not tried for long is taken to be like the one before it, and so is tried again.
            share = (self._held[place] + WEIGHT * share) / (self._offered[place] + WEIGHT)
            chance *= share
            tokens += chance
        return tokens

    def _best(self, size: int) -> int:
        """Return the width of the most tokens a second."""
        speeds = {
            width: self._tokens(width) / max(self._seconds[size, width], 1e-9)
            for width in WIDTHS
            if (size, width) in self._seconds
        }
        return max(speeds, key=speeds.__getitem__)


class Switch(Protocol):
    """Decides which batches are decoded with drafts."""

    def is_on(self, num_rows: int, *, known: bool) -> bool:
        """Return whether a batch is decoded with drafts.

        known: whether any of its prompts has earlier answers.
        """
        ...

    def note(self, num_rows: int, *, known: bool, drafted: bool, seconds: float, tokens: int) -> None:
        """Take a batch into account. drafted: whether it was decoded with drafts."""
        ...


class MeasuredSwitch:
    """Lets a batch draft if such batches took fewer seconds for a token with drafts than without.

    Batches are told apart by their size (1, 2 to 3, 4 to 7, ... rows), and by whether they have earlier
    answers. Either way is tried ``TRIALS`` times, in turn, and the slower one once in ``AGAIN`` batches.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, bool, bool], float] = {}  # (size, known, drafted) → seconds for a token
        self._batches: dict[tuple[int, bool, bool], int] = {}
        self._is_on: dict[tuple[int, bool], bool] = {}  # what the log said last

    def is_on(self, num_rows: int, *, known: bool) -> bool:
        kind = num_rows.bit_length(), known
        tried = {drafted: self._batches.get((*kind, drafted), 0) for drafted in (True, False)}
        if min(tried.values()) < TRIALS:
            return tried[True] <= tried[False]
        pays = self._pays(kind)
        return not pays if sum(tried.values()) % AGAIN == 0 else pays

    def _pays(self, kind: tuple[int, bool]) -> bool:
        return self._seconds[*kind, True] < self._seconds[*kind, False]

    def note(self, num_rows: int, *, known: bool, drafted: bool, seconds: float, tokens: int) -> None:
        kind, own = (num_rows.bit_length(), known), seconds / max(1, tokens)
        key = *kind, drafted
        mean = self._seconds.get(key, own)
        self._seconds[key] = mean + (FASTER if own < mean else SLOWER) * (own - mean)
        self._batches[key] = self._batches.get(key, 0) + 1
        if min(self._batches.get((*kind, way), 0) for way in (True, False)) < TRIALS:
            return
        if (pays := self._pays(kind)) != self._is_on.get(kind):
            self._is_on[kind] = pays
            log.info(
                "rollout.speculation: batches of %d to %d samples%s are decoded %s drafts: a token takes %.2g s with "
                "drafts, %.2g s without",
                *(1 << kind[0] - 1, (1 << kind[0]) - 1, "" if known else " without earlier answers"),
                *("with" if pays else "without", self._seconds[*kind, True], self._seconds[*kind, False]),
            )

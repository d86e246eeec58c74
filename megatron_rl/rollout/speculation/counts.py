"""The counts of drafted and accepted tokens, and the metrics made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

DRAFTED, ACCEPTED, PASSES = "speculation/drafted", "speculation/accepted", "speculation/passes"


class Counts:
    """Adds up what a batch's passes drafted and accepted, until ``take``."""

    def __init__(self) -> None:
        self.drafted = self.accepted = self.passes = 0

    def note(self, drafts: Sequence[tuple[int, int]]) -> None:
        """Add one forward pass. drafts: (drafted, accepted) tokens of each row (sample) in it."""
        self.drafted += sum(drafted for drafted, _ in drafts)
        self.accepted += sum(accepted for _, accepted in drafts)
        self.passes += len(drafts)

    def take(self) -> dict[str, int]:
        """Return metric name → count since the last call. A pass counts once for each sample in it."""
        counts = {DRAFTED: self.drafted, ACCEPTED: self.accepted, PASSES: self.passes}
        self.drafted = self.accepted = self.passes = 0
        return counts


def added(*sources: Callable[[], Mapping[str, int]]) -> Callable[[], dict[str, int]]:
    """Return a callable that returns the counts of all sources, whose names differ."""
    return lambda: {name: count for source in sources for name, count in source().items()}


def tokens_per_pass(values: Mapping[str, float]) -> dict[str, float]:
    """Return the metric of how many tokens a sample gains in a forward pass: the accepted ones, and one drawn.

    values: metric name → value, with the counts above.
    """
    return {"speculation/tokens_per_pass": 1.0 + values[ACCEPTED] / max(1.0, values[PASSES])}

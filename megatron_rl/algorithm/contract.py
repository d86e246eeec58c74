"""The result of one test of a user's own estimator or loss: whether it has a property that its contract demands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Holds the result of testing one property.

    name: the property, as a sentence.
    holds: whether the property held on every try.
    detail: how the property failed, or the number that was measured.
    """

    name: str
    holds: bool
    detail: str

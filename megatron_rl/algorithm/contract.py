"""The result of trying one property that a part of the user's own must have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Holds the result of one property.

    name: the property, as a sentence.
    holds: whether it held on every try.
    detail: how it failed, or the measure.
    """

    name: str
    holds: bool
    detail: str

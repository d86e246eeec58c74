"""Checks that rewards, advantages and the numbers between them are finite in float32; errors name the sample.

The loss reads advantages in float32. A number that is NaN, infinite or beyond float32 is an error,
and never a reason to drop its sample. Otherwise a run whose advantages are NaN would drop every
sample, step without gradients, and end without an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron_rl.errors import ConfigError, NonFiniteAdvantage

LARGEST = float(np.finfo(np.float32).max)


def require_finite(
    values: np.ndarray, name: str, sample_ids: Sequence[str], way_out: str, *, included: np.ndarray | None = None
) -> None:
    """Raise NonFiniteAdvantage if a sample's number is not finite in float32, naming the first such sample.

    values: float64 [S], one number of each sample.
    name: the noun for the number in the message, such as "the reward".
    sample_ids: S names; empty: the message gives the index.
    way_out: the message's last words: the settings and causes to look at.
    included: bool [S], the samples that are checked; None: all.
    """
    bad = np.flatnonzero(not_finite(values) if included is None else included & not_finite(values))
    if len(bad):
        raise NonFiniteAdvantage(
            f"{name} of sample {sample_name(sample_ids, bad[0])} is {_said(values[bad[0]])} ({len(bad)} such in the "
            f"batch), so the loss would not be finite; {way_out}"
        )


def not_finite(values: np.ndarray) -> np.ndarray:
    """Return bool, of the shape of ``values``: True for NaN, infinity and numbers beyond float32."""
    with np.errstate(invalid="ignore"):
        return ~(np.abs(values) <= LARGEST)


def sample_name(sample_ids: Sequence[str], index: int) -> str:
    """Return a sample's name for messages: its id, or its index if ids are not known."""
    return sample_ids[index] if sample_ids else f"index {index}"


def _said(value: float) -> str:
    return f"{value:g}, beyond float32's {LARGEST:.3g}" if math.isfinite(value) else str(float(value))


def require_epsilon(key: str, value: float) -> None:
    """Raise ConfigError unless an ε of the configuration is a finite number of at least 0."""
    if not 0.0 <= value < math.inf:
        raise ConfigError(f"{key}={value} must be a finite number, at least 0: it would decide which samples train")

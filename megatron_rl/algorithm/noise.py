"""Gaussian noise on the advantages of a run's first steps: ``advantage.noise_std``, an option (docs/semantics.md §6).

Training does not need the noise: a first loss of 0 is no fault (docs/skip.md, "The loss is 0"). The
noise has mean 0 and is drawn independently of the samples. So it does not change the expected
gradient, but adds variance. The noise is **not** centred within a group. If it were, a group's
advantages would still add up to 0. Then the first loss under ``sequence_mean`` would stay 0, which
the noise is meant to change.

Invariants (``assert_invariants`` in tests/unit/algorithm/test_noise.py):

1. A sample without signal keeps its advantage exactly, even if others of its group have signal. So
   noise never gives a dropped sample a gradient.
2. The noise of a sample depends on (run seed, sample id) alone: not on its batch, its position in
   the batch, a rank or a topology.
3. The noise is ``std`` times a standard normal number; with ``std`` 0 nothing changes.
4. No input is changed, and finite advantages stay finite: the normal number is within ±8.3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

_NORMAL = NormalDist()


def with_noise(
    advantages: np.ndarray, signal: np.ndarray, sample_ids: Sequence[str], *, std: float, seed: int
) -> np.ndarray:
    """Return float64 [S]: ``advantages`` [S], plus ``std`` times a standard normal number where ``signal`` is True.

    The numbers of two machines may differ in the last bit (`standard_normal`). So one rank must
    compute them for all ranks.

    signal: bool [S], True for samples that train; the others get no noise.
    seed: the run's seed.

    Example: advantages (0.5, −0.5, 0, 0), signal (T, T, F, F), std 0.1 → for instance (0.43, −0.52,
    0, 0).
    """
    noisy = advantages.astype(np.float64)
    if std:
        for i in np.flatnonzero(signal):
            noisy[i] += std * standard_normal(seed, sample_ids[i])
    return noisy


def standard_normal(seed: int, sample_id: str) -> float:
    """Return one standard normal number that depends on (seed, sample_id) alone, up to rounding.

    A uniform number is made from Philox's raw bits, which are equal in all versions of NumPy (NEP
    19). Wichura's AS241 maps it to the normal distribution by rational functions, and in the tails
    by a logarithm. Only the logarithm may round differently on another machine, by its C library.
    """
    key = np.frombuffer(hashlib.sha256(f"advantage noise/{seed}/{sample_id}".encode()).digest()[:16], dtype="<u8")
    uniform = ((int(np.random.Philox(key=key).random_raw()) >> 12) + 0.5) * 2.0**-52  # in (0, 1), both ends excluded
    return _NORMAL.inv_cdf(uniform)

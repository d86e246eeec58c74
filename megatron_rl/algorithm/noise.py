"""Gaussian noise on the advantages of a run's first steps (``advantage.noise_std``), for comparison (semantics §6).

Training does not need the noise: a first loss of 0 is no fault (docs/skip.md, "The loss is 0"). The noise has
mean 0 and is drawn independently of the samples. So it does not change the expected gradient, but
adds variance. The noise is **not** centred within a group. Centred noise would leave a group's sum
at 0, and so the first loss under ``sequence_mean``, which the noise is meant to move. Pure
functions of numbers.

Invariants (``assert_invariants`` in tests/unit/algorithm/test_noise.py):

1. A sample without signal keeps its advantage exactly, in a group with signal too. So noise gives
   no dropped sample a signal.
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
    """Return [S] float64: advantages [S], plus ``std`` times a standard normal number for samples with signal.

    The numbers of two machines may differ in the last bit (`standard_normal`), so every rank must
    use one rank's numbers.

    signal: bool [S].

    Example: advantages (0.5, −0.5, 0, 0), signal (T, T, F, F), std 0.1 → for instance (0.43, −0.52,
    0, 0).
    """
    noisy = advantages.astype(np.float64)
    if std:
        for i in np.flatnonzero(signal):
            noisy[i] += std * standard_normal(seed, sample_ids[i])
    return noisy


def standard_normal(seed: int, sample_id: str) -> float:
    """Return one standard normal number, the same for the same (seed, sample_id), up to rounding, on every machine.

    The uniform number is made of Philox's raw bits, which NumPy keeps across versions (NEP 19).
    Wichura's AS241 maps it to the normal distribution by rational functions, and in the tails by a
    logarithm. The logarithm alone may round differently in another C library.
    """
    key = np.frombuffer(hashlib.sha256(f"advantage noise/{seed}/{sample_id}".encode()).digest()[:16], dtype="<u8")
    uniform = ((int(np.random.Philox(key=key).random_raw()) >> 12) + 0.5) * 2.0**-52  # in (0, 1), both ends excluded
    return _NORMAL.inv_cdf(uniform)

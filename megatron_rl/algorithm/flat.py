"""Arrays that lie flat over a batch's response tokens, sample after sample (``BatchFacts.response_offsets``)."""

from __future__ import annotations

import numpy as np


def token_owner(response_tokens: np.ndarray) -> np.ndarray:
    """Return [T] int64: the index of each response token's sample. response_tokens: int64 [S]."""
    return np.repeat(np.arange(len(response_tokens)), response_tokens)


def sum_per_sample(values: np.ndarray, response_tokens: np.ndarray) -> np.ndarray:
    """Return [S] float64: the sum of each sample's tokens.

    values: [T] flat.
    response_tokens: int64 [S], the number of response tokens of each sample.

    Example: values (1, 2, 4) of samples of 2 and 1 tokens → (3, 4).
    """
    return np.bincount(token_owner(response_tokens), weights=values, minlength=len(response_tokens))

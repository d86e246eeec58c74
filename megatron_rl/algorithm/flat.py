"""Functions on arrays [T] with one number per response token of a batch, sample after sample."""

from __future__ import annotations

import numpy as np


def token_owner(response_tokens: np.ndarray) -> np.ndarray:
    """Return int64 [T], the index of each response token's sample.

    response_tokens: int64 [S], the number of response tokens of each sample.
    """
    return np.repeat(np.arange(len(response_tokens)), response_tokens)


def sum_per_sample(values: np.ndarray, response_tokens: np.ndarray) -> np.ndarray:
    """Return float64 [S], the sum of ``values`` over each sample's response tokens.

    values: [T], one number per response token.
    response_tokens: int64 [S], the number of response tokens of each sample.

    Example: values (1, 2, 4) of samples of 2 and 1 tokens → (3, 4).
    """
    return np.bincount(token_owner(response_tokens), weights=values, minlength=len(response_tokens))

"""Soft overlong punishment: a pure function of lengths (DAPO, arXiv:2503.14476, section 3.4, eq. 13).

A response that runs into the limit is cut, and its reward says little of its reasoning. So the reward falls before the
limit is reached:

    R(y) = 0                                  where |y| ≤ L − b
           ((L − b) − |y|) / b                where L − b < |y| ≤ L
           −1                                 where |y| > L
"""

from __future__ import annotations

import numpy as np


def overlong_shape(response_tokens: np.ndarray, *, max_response_tokens: int, buffer_tokens: int) -> np.ndarray:
    """Return [S] float64, the punishment of each response by eq. 13; all 0 where ``buffer_tokens`` is 0.

    response_tokens: int64 [S], the number of tokens of each response.
    max_response_tokens: tokens, L of eq. 13 (``rollout.max_response_tokens``).
    buffer_tokens: tokens, b of eq. 13 (``reward.overlong_buffer_tokens``); b ≤ L.

    The result times ``reward.overlong_penalty`` joins the total reward.
    Example: L = 10, b = 4: lengths (6, 7, 8, 10) → (0, −0.25, −0.5, −1).
    """
    assert buffer_tokens <= max_response_tokens, (buffer_tokens, max_response_tokens)
    if buffer_tokens == 0:
        return np.zeros(len(response_tokens))
    return np.clip((max_response_tokens - buffer_tokens - response_tokens) / buffer_tokens, -1.0, 0.0)

"""Soft overlong punishment (DAPO, arXiv:2503.14476, section 3.4, eq. 13). Pure: numbers in, numbers out.

A response that runs into the limit is cut, and its reward says little of its reasoning. So the reward falls before the
limit is reached:

    R(y) = 0                                  where |y| ≤ L − b
           ((L − b) − |y|) / b                where L − b < |y| ≤ L
           −1                                 where |y| > L
"""

from __future__ import annotations

import numpy as np


def overlong_shape(response_tokens: np.ndarray, *, max_response_tokens: int, buffer_tokens: int) -> np.ndarray:
    """[S] float64, eq. 13 with L = ``rollout.max_response_tokens`` and b = ``reward.overlong_buffer_tokens``; all 0
    where b is 0.

    response_tokens: int64 [S], all tokens of each response. Times ``reward.overlong_penalty`` it is what joins the
    total reward. b ≤ L.

    Example: L = 10, b = 4: lengths (6, 7, 8, 10) → (0, −0.25, −0.5, −1).
    """
    assert buffer_tokens <= max_response_tokens, (buffer_tokens, max_response_tokens)
    if buffer_tokens == 0:
        return np.zeros(len(response_tokens))
    return np.clip((max_response_tokens - buffer_tokens - response_tokens) / buffer_tokens, -1.0, 0.0)

"""A response that supervised steps imitate, as tokens: of a text, or of an episode of turns and observations."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Holds a response that a supervised warm-up imitates.

    response_ids: [T] behind the prompt, every turn with the token that ends it.
    loss_mask:    [T] True on the assistant's turns; None: the whole response is one turn.
    """

    prompt: Prompt
    response_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...] | None = None


def read_at_end(solution: Solution) -> Solution:
    """Return a response with one more token, which alone is counted and never runs.

    A value head's number of a token is read from the state before it (critic/critic.py), so that of
    the added token is read from the response's last one, as transformers' sequence classifiers do.

    Example: response (7, 2) → (7, 2, 2) with mask (F, F, T).
    """
    ids = solution.response_ids
    return dataclasses.replace(solution, response_ids=(*ids, ids[-1]), loss_mask=(*(False for _ in ids), True))

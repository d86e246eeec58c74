"""``Solution``: the tokens of a prompt and of a response, one turn or a whole episode, for supervised steps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Holds a prompt and a response that supervised steps train on.

    response_ids: [T] the tokens after the prompt, each turn with the token that ends it.
    loss_mask: [T] True on the tokens of the assistant's turns. None: the response is one turn, all
        of whose tokens have a loss.
    """

    prompt: Prompt
    response_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...] | None = None


def read_at_end(solution: Solution) -> Solution:
    """Return the solution with its last token repeated, so that a value head is read at the response's last token.

    A value head computes a token's value from the hidden state before the token (critic/critic.py).
    So the added token's value comes from the state of the token that it repeats, as in
    transformers' sequence classifiers. The added token alone has a loss; its id is not used.

    Example: response (7, 2) → (7, 2, 2) with mask (F, F, T).
    """
    ids = solution.response_ids
    return dataclasses.replace(solution, response_ids=(*ids, ids[-1]), loss_mask=(*(False for _ in ids), True))

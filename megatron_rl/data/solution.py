"""A response that supervised steps imitate, as tokens: a text, or an episode of turns and observations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.data.chat import Message, Observations
from megatron_rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Holds a response that a supervised warm-up imitates.

    response_ids: [T] behind the prompt, every turn ended by the end-of-sequence token.
    loss_mask:    [T] True on the assistant's turns; None: the whole response is one turn.
    """

    prompt: Prompt
    response_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...] | None = None


def tokenize_solution(prompt: Prompt, given: str | Sequence[Message], tokenizer, template: str) -> Solution:
    """Return the tokens of a solution, with a loss on the assistant's turns alone.

    given: a text, or messages of which the first and the last are the assistant's.
    template: ``data.template``.
    """

    def turn(text: str) -> tuple[int, ...]:
        return (*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id)

    if isinstance(given, str):
        return Solution(prompt=prompt, response_ids=turn(given))
    observations = Observations(tokenizer, template)
    token_ids: list[int] = []
    mask: list[bool] = []
    waiting: list[Message] = []
    for message in given:
        if message["role"] != "assistant":
            waiting.append(message)
            continue
        if waiting:
            text = "".join(other["content"] for other in waiting)
            between = observations.token_ids(waiting if template == "chat" else text, tokenizer.eos_token_id)
            token_ids, mask, waiting = [*token_ids, *between], [*mask, *[False] * len(between)], []
        said = turn(message["content"])
        token_ids, mask = [*token_ids, *said], [*mask, *[True] * len(said)]
    return Solution(prompt=prompt, response_ids=tuple(token_ids), loss_mask=tuple(mask))


def read_at_end(solution: Solution) -> Solution:
    """Return a response with one more token, which alone is counted and never runs.

    A value head's number of a token is read from the state before it (critic/critic.py), so that of the added token is
    read from the response's last one, as transformers' sequence classifiers do.

    Example: response (7, 2) → (7, 2, 2) with mask (F, F, T).
    """
    ids = solution.response_ids
    return dataclasses.replace(solution, response_ids=(*ids, ids[-1]), loss_mask=(*(False for _ in ids), True))

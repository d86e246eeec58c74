"""A response that supervised steps imitate, as tokens: a text, or an episode of turns and observations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.data.chat import Message, Observations
from megatron_rl.data.turns import Turns
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


def tokenize_solution(prompt: Prompt, given: str | Sequence[Message], tokenizer, template: str) -> Solution:
    """Return the tokens of a solution behind a prompt that is a text, with a loss on the assistant's turns alone.

    given: a text, or messages of which the first and the last are the assistant's; every turn ends in the tokenizer's
        end of sequence, and the others' messages are unchanged text.
    template: ``data.template``.
    """

    def turn(text: str) -> tuple[int, ...]:
        return (*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id)

    if isinstance(given, str):
        return Solution(prompt=prompt, response_ids=turn(given))
    observations = Observations(tokenizer, template)
    token_ids: list[int] = []
    mask: list[bool] = []
    waiting = ""
    for message in given:
        if message["role"] != "assistant":
            waiting += message["content"]
            continue
        between = observations.token_ids(waiting, tokenizer.eos_token_id)
        said, waiting = turn(message["content"]), ""
        token_ids += (*between, *said)
        mask += [False] * len(between) + [True] * len(said)
    return Solution(prompt=prompt, response_ids=tuple(token_ids), loss_mask=tuple(mask))


def tokenize_turns(prompt: Prompt, turns: Turns, tokenizer, *, masked: bool) -> Solution:
    """Return the tokens of a conversation that the chat template wrote, with a loss on its turns alone.

    masked: whether the response has a mask though it is one turn.

    Turns are tokenized apart from what stands before them, as the policy meets them. The prompt is the text before the
    first turn: it may lack an end of the generation prompt that the template does not write before a turn.
    """

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    behind = turns.spans[0][0]
    if turns.text[:behind] != prompt.text:
        text = turns.text[:behind]
        prompt = dataclasses.replace(prompt, text=text, token_ids=tuple(encode(text)))
    token_ids: list[int] = []
    mask: list[bool] = []
    for first, last in turns.spans:
        between, said = encode(turns.text[behind:first]) if first > behind else [], encode(turns.text[first:last])
        token_ids += [*between, *said]
        mask += [False] * len(between) + [True] * len(said)
        behind = last
    return Solution(prompt=prompt, response_ids=tuple(token_ids), loss_mask=tuple(mask) if masked else None)


def read_at_end(solution: Solution) -> Solution:
    """Return a response with one more token, which alone is counted and never runs.

    A value head's number of a token is read from the state before it (critic/critic.py), so that of the added token is
    read from the response's last one, as transformers' sequence classifiers do.

    Example: response (7, 2) → (7, 2, 2) with mask (F, F, T).
    """
    ids = solution.response_ids
    return dataclasses.replace(solution, response_ids=(*ids, ids[-1]), loss_mask=(*(False for _ in ids), True))

"""Checked requests of agents, the text form in which messages are compared, and the error of a refused request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.rollout.endpoint.recorder import Conversation

# The limit of an agent's reward. Beyond it, advantages times a gradient can exceed float32, which ends a
# run under any on_error.
MOST_REWARD = 1e12


class Refused(ValueError):
    """Raised for a request that is not served. The message names the field, its value and the fix.

    status: the HTTP status of the answer.
    code: OpenAI's name of the error.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """Holds one checked request of an agent for a completion (``bodies.py``).

    frame: the request's kind: ("chat", digest of its tools), ("text", "") or ("ids", "").
    conversation: a text, token ids, or messages as JSON texts (``canonical``). The turn that the
        request extends is found by it.
    messages: the messages as dicts, for the chat template; None for a text or token ids.
    tools: descriptions of functions, for the chat template; None if there are none.
    num_characters: the number of characters of the conversation and the tools. For token ids, the
        number of tokens.
    max_tokens: the maximum of tokens to sample; None: as many as the session has left.
    """

    frame: tuple[str, str]
    conversation: Conversation
    messages: tuple[Mapping, ...] | None
    tools: tuple[Mapping, ...] | None
    num_characters: int
    max_tokens: int | None
    stream: bool
    logprobs: bool
    usage_in_stream: bool
    model: str

    @property
    def is_chat(self) -> bool:
        return self.messages is not None


def canonical(value: object) -> str:
    """Return a checked message, or the tools, as a JSON text with sorted keys. Equal values have equal texts."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)

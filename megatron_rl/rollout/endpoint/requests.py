"""Requests that were checked: what is compared with a session's record, rendered and sampled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.rollout.endpoint.recorder import Conversation

# Of an agent's reward. Beyond it advantages times a gradient leave float32, which ends a run
# whatever on_error says.
MOST_REWARD = 1e12


class Refused(ValueError):
    """Reports a request that is not served: the message names the field, the value and the way out.

    status: HTTP's code. code: OpenAI's name of the error.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """Holds a request that was checked (``bodies.py``).

    frame: as in ``recorder.Turn``. conversation: a text, token ids, or messages, each by
        ``canonical``.
    messages: the conversation, each message in its one form; None for a text or token ids.
    tools: descriptions of functions, for the template; None: none.
    num_characters: of the conversation and the tools; of token ids their number.
    max_tokens: the most tokens that are sampled; None: as many as the session has left.
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
    """Return a checked message, or tools, as the text by which conversations are compared."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)

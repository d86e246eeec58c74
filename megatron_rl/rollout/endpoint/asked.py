"""Requests as they are asked: their bodies checked, and messages in the form in which conversations are compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.data.chat import ROLES
from megatron_rl.rollout.endpoint.recorder import Conversation

# Fields that change what is sampled, and the values under which they change nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "stop": ([], ""),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "top_logprobs": (0,),
}


class Refused(ValueError):
    """Reports a request that is not served: the message names the field, the value and the way out.

    status: HTTP's code. code: OpenAI's name of the error.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Holds a request that was checked.

    frame, conversation: as in ``recorder.Turn``.
    messages: the conversation, each message in its one form; None for a text or token ids.
    tools: descriptions of functions, for the template; None: none.
    max_tokens: the most tokens that are sampled; None: as many as the session has left.
    """

    frame: tuple[str, str]
    conversation: Conversation
    messages: tuple[Mapping, ...] | None
    tools: tuple[Mapping, ...] | None
    max_tokens: int | None
    stream: bool
    logprobs: bool
    usage_in_stream: bool
    model: str

    @property
    def is_chat(self) -> bool:
        return self.messages is not None


def asked_chat(body: Mapping, temperature: float) -> Asked:
    """Return a request for a chat completion. ``temperature``: ``rollout.temperature``. Raises Refused."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise Refused(f"messages={given!r:.80} must be a list of at least one message")
    messages = [checked_message(message, f"messages[{number}]") for number, message in enumerate(given)]
    if messages[-1]["role"] == "assistant":
        raise Refused("messages must not end with the assistant's: nothing is said that it could answer")
    tools = body.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise Refused(f"tools={tools!r:.80} must be a list of functions' descriptions")
    if body.get("tool_choice") == "none":
        tools = None
    return Asked(
        frame=("chat", json.dumps(tools, sort_keys=True)),
        conversation=tuple(canonical(message) for message in messages),
        messages=tuple(messages),
        tools=None if tools is None else tuple(tools),
        **_common(body, temperature, ("max_completion_tokens", "max_tokens")),
    )


def asked_completion(body: Mapping, temperature: float) -> Asked:
    """Return a request for the completion of a text or of token ids. Raises Refused."""
    given = body.get("prompt")
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    is_ids = isinstance(given, list) and all(type(token) is int for token in given)
    if not given or not (isinstance(given, str) or is_ids):
        raise Refused(f"prompt={given!r:.80} must be a text, or a list of token ids, and not empty")
    if body.get("logprobs"):
        raise Refused(f"logprobs={body['logprobs']!r:.80} is not given here; ask /v1/chat/completions, or leave it out")
    return Asked(
        frame=("ids" if is_ids else "text", ""),
        conversation=tuple(given) if is_ids else given,
        messages=None,
        tools=None,
        **_common(body, temperature, ("max_tokens",)),
    )


def _common(body: Mapping, temperature: float, bounds: Sequence[str]) -> dict[str, object]:
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise Refused(
                f"{name}={value!r:.80} would change what is sampled, which the trainer's log-probs are of; leave it out"
            )
    wanted = body.get("temperature")
    if wanted is not None and wanted != temperature:
        raise Refused(
            f"temperature={wanted!r:.80}: the run samples at rollout.temperature={temperature:g}, at which the trainer "
            "takes log-probs; leave it out, or change that setting"
        )
    bound = next((body[name] for name in bounds if body.get(name) is not None), None)
    if bound is not None and (type(bound) is not int or bound < 1):
        raise Refused(f"{bounds[0]}={bound!r:.80} must be a number of tokens, at least 1")
    options = body.get("stream_options")
    return {
        "max_tokens": bound,
        "stream": body.get("stream") is True,
        "logprobs": body.get("logprobs") is True,
        "usage_in_stream": isinstance(options, dict) and options.get("include_usage") is True,
        "model": str(body.get("model", "policy"))[:200],
    }


def checked_message(message: object, where: str) -> dict:
    """Return a message in its one form: role, content as text, and where there are any, calls, call id and name.

    Raises Refused; ``where`` begins its message.
    """
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise Refused(f"{where} is {message!r:.80}; it must have a role of {', '.join(ROLES)}")
    checked: dict[str, object] = {"role": message["role"], "content": _text(message.get("content"), where)}
    if message.get("tool_calls"):
        checked["tool_calls"] = [_checked_call(call, where) for call in message["tool_calls"]]
    for name in ("tool_call_id", "name"):
        if message.get(name) is not None:
            checked[name] = str(message[name])
    return checked


def _text(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(part, str) for part in parts):
            return "".join(parts)
    raise Refused(f"{where}: content is {content!r:.80}; it must be a text, or parts of type text")


def _checked_call(call: object, where: str) -> dict:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Refused(f'{where}: tool call {call!r:.80} must be {{"id": ..., "function": {{"name", "arguments"}}}}')
    arguments = function.get("arguments")
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": str(call.get("id")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def canonical(message: Mapping) -> str:
    """Return a checked message as the text by which conversations are compared."""
    return json.dumps(message, sort_keys=True)

"""The strict schemas of requests' bodies, and the conversion of checked bodies to requests.

A request is refused if a value does not fit the schema, or if a field would change what is sampled,
such as top_p=0.9. The answer is status 400 with the field's name and advice. NEUTRAL lists the
fields that can change what is sampled, each with the values that change nothing and are accepted.
All other fields are ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_rl.data.chat import ROLES
from megatron_rl.errors import quoted
from megatron_rl.rollout.endpoint.requests import MOST_REWARD, CompletionRequest, Refused, canonical

# Fields that can change what is sampled, each with the values that change nothing.
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
# What a refused field has to be. For other fields the answer has pydantic's own words.
WANTED = {
    "messages": "must be a list of at least one message",
    "role": f"must be one of {', '.join(ROLES)}",
    "content": "must be a text, or parts of type text",
    "tools": "must be a list of functions' descriptions",
    "tool_calls": 'must be a list of {"id": ..., "function": {"name": ..., "arguments": ...}}',
    "prompt": "must be a text, or a list of token ids, and not empty",
    "logprobs": "is not given here; ask /v1/chat/completions for true or false, or leave it out",
    "max_tokens": "must be a number of tokens, at least 1",
    "max_completion_tokens": "must be a number of tokens, at least 1",
    "reward": f"must be a finite number, of at most {MOST_REWARD:.0e} either way",
}


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class Part(_Body):
    text: str


class Function(_Body):
    name: str
    arguments: Any = None  # a JSON text, or the value itself


class Call(_Body):
    id: str | None = None
    function: Function


class Message(_Body):
    role: Literal[ROLES]
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def plain(self) -> dict:
        """Return the message as a dict with role and content, and if present tool_calls, tool_call_id and name.

        The content is one text, and the arguments of each tool call are a JSON text.
        """
        parts = self.content or ""
        message: dict[str, object] = {
            "role": self.role,
            "content": parts if isinstance(parts, str) else "".join(part.text for part in parts),
        }
        if self.tool_calls:
            message["tool_calls"] = [_plain_call(call) for call in self.tool_calls]
        beside = {"tool_call_id": self.tool_call_id, "name": self.name}
        return message | {name: value for name, value in beside.items() if value is not None}


def _plain_call(call: Call) -> dict:
    arguments = call.function.arguments
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": str(call.id), "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


class StreamOptions(_Body):
    include_usage: bool | None = None


class Completing(_Body):
    """Holds the body fields that chat completions and text completions have in common."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ChatBody(Completing):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None


Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Single = Field(min_length=1, max_length=1)


class CompletionBody(Completing):
    prompt: Text | Ids | Annotated[list[Text], Single] | Annotated[list[Ids], Single]
    logprobs: Literal[0, False] | None = None


class RewardBody(_Body):
    reward: Annotated[float, Field(ge=-MOST_REWARD, le=MOST_REWARD)]


Kind = TypeVar("Kind", bound=_Body)


def checked(body: Mapping, kind: type[Kind]) -> Kind:
    """Return a body as an object of the schema ``kind``. Raises Refused, naming the field that does not fit."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
    # pydantic's location also names the variant of a union. Keep only the parts that are in the body.
    path, value = [], body
    for part in fault["loc"]:
        if isinstance(value, list) and isinstance(part, int):
            path[-1] += f"[{part}]"
            value = value[part]
        elif isinstance(value, dict) and (part in value or fault["type"] == "missing"):
            path.append(part)
            value = value.get(part)
    wanted = WANTED.get(path[-1].partition("[")[0]) or f"is refused: {fault['msg']}"
    raise Refused(f"{'.'.join(path)}={quoted(value, 80)} {wanted}")


def chat_request(body: Mapping, temperature: float) -> CompletionRequest:
    """Return the checked request in the body of a chat completion. ``temperature``: ``rollout.temperature``.

    Raises Refused for a body that does not fit.
    """
    fields = checked(body, ChatBody)
    messages = tuple(message.plain() for message in fields.messages)
    if messages[-1]["role"] == "assistant":
        raise Refused("messages must not end with an assistant message; end with a user or tool message")
    tools = None if body.get("tool_choice") == "none" else fields.tools or None
    written = canonical(tools)
    conversation = tuple(canonical(message) for message in messages)
    return CompletionRequest(
        frame=("chat", hashlib.blake2b(written.encode(), digest_size=16).hexdigest()),
        conversation=conversation,
        messages=messages,
        tools=None if tools is None else tuple(tools),
        num_characters=len(written) + sum(map(len, conversation)),
        logprobs=fields.logprobs is True,
        **_common(body, fields, temperature, fields.max_completion_tokens or fields.max_tokens),
    )


def completion_request(body: Mapping, temperature: float, vocab_size: int) -> CompletionRequest:
    """Return the checked request in the body of a text completion, whose prompt is a text or token ids.

    temperature: ``rollout.temperature``.
    vocab_size: token ids must be below it.

    Raises Refused for a body that does not fit.
    """
    fields = checked(body, CompletionBody)
    prompt = fields.prompt
    if isinstance(prompt, list) and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    is_ids = isinstance(prompt, list)
    for token in prompt if is_ids else ():
        if not 0 <= token < vocab_size:
            raise Refused(
                f"prompt holds token {quoted(token)}, and the model has tokens from 0 to {vocab_size - 1}; give ids "
                "of its tokenizer, or the text"
            )
    return CompletionRequest(
        frame=("ids" if is_ids else "text", ""),
        conversation=tuple(prompt) if is_ids else prompt,
        messages=None,
        tools=None,
        num_characters=len(prompt),
        logprobs=False,
        **_common(body, fields, temperature, fields.max_tokens),
    )


def reward_in(body: Mapping) -> float:
    """Return the reward in a body. Raises Refused for a body without a finite number."""
    return checked(body, RewardBody).reward


def _common(body: Mapping, fields: Completing, temperature: float, most_tokens: int | None) -> dict[str, object]:
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise Refused(
                f"{name}={quoted(value, 80)} would change the distribution that is sampled, and the trainer's "
                "log-probs would not match; leave it out"
            )
    if fields.temperature is not None and fields.temperature != temperature:
        raise Refused(
            f"temperature={fields.temperature:g}: the run samples at rollout.temperature={temperature:g}, at which the "
            "trainer takes log-probs; leave it out, or change that setting"
        )
    return {
        "max_tokens": most_tokens,
        "stream": fields.stream is True,
        "usage_in_stream": fields.stream_options is not None and fields.stream_options.include_usage is True,
        "model": (fields.model or "policy")[:200],
    }

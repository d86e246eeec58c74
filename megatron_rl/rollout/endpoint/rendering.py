"""The conversion of requests to tokens, and of sampled texts to answers in OpenAI's format."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from megatron_rl.data.chat import TURN, check_stays, render_chat, text_behind_turn, tokens_behind
from megatron_rl.errors import ConfigError, shortened
from megatron_rl.json_text import parse_json
from megatron_rl.rollout.endpoint.recorder import Turn
from megatron_rl.rollout.endpoint.requests import CompletionRequest, Refused

# Forms of a message with calls: (whether arguments are an object instead of a text, its empty content).
FORMS = ((True, ""), (False, ""), (True, None), (False, None))
LEAST_CHARACTERS = 2**16  # any request may have, even with a small context, since templates may shorten tools
MOST_SAID = 1000  # characters of a template's or a tokenizer's own words in an error
# Hermes', Qwen's and other templates ask for calls in this form. A call in another form stays in the content.
CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class Rendering:
    """Turns a request into tokens. Messages are first rendered by the tokenizer's chat template.

    If the request extends an earlier turn, only its new part is turned into tokens.

    variables: ``data.template_variables``.

    OpenAI's clients send a tool call's arguments as a JSON text, and the message's content as "".
    Some chat templates need the arguments as an object, or the content None. So messages are
    rewritten to the first form of FORMS that the template accepts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, object] | None = None) -> None:
        self._tokenizer, self._variables = tokenizer, variables or {}
        self._form: tuple[bool, str | None] | None = None
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        self._encode("0")  # a fast tokenizer's first call changes its state, which two threads must not do at once

    def most_characters(self, num_tokens: int) -> int:
        """Return the maximum of characters in a request of ``num_tokens`` tokens.

        It follows from the longest token of the vocabulary.
        """
        return max(LEAST_CHARACTERS, num_tokens * self._longest_token)

    def new_ids(self, request: CompletionRequest, parent: Turn | None) -> tuple[int, ...]:
        """Return the tokens between the last token of turn ``parent`` and the first token to sample.

        parent: the turn that the request extends. None: all tokens of the request are returned.

        Raises Refused for every error of the template or the tokenizer.
        """
        try:
            return self._new_ids(request, parent)
        except (KeyboardInterrupt, SystemExit):
            raise
        except ConfigError as error:
            raise Refused(shortened(str(error), MOST_SAID)) from error
        except BaseException as error:  # the tokenizer's Rust code raises PanicException, which is no Exception
            said = shortened(f"{type(error).__name__}: {error}", MOST_SAID)
            raise Refused(
                f"the tokenizer or its chat template cannot read the request ({said}); change the request"
            ) from error

    def _new_ids(self, request: CompletionRequest, parent: Turn | None) -> tuple[int, ...]:
        start = 0 if parent is None else parent.known[0]
        if request.frame[0] == "ids":
            return request.conversation[start:]
        if not request.is_chat:
            return self._encode(request.conversation[start:])
        messages = self._as_template_reads(request.messages)
        beside = dict(self._variables) if request.tools is None else {**self._variables, "tools": list(request.tools)}
        if parent is None:
            return self._encode(
                render_chat(self._tokenizer, messages, "messages", add_generation_prompt=True, beside=beside)
            )
        # The parent's messages end with its reply. The reply is not rendered, since its sampled tokens
        # are kept.
        before, new = messages[: start - 1], messages[start:]
        first = parent.path()[0].known[0] - 1
        then = [*before[first:], {"role": "assistant", "content": TURN}, *new]
        check_stays(self._tokenizer, before[:first], then, "messages", beside)
        behind = text_behind_turn(self._tokenizer, before, new, "messages", beside=beside)
        end = text_behind_turn(self._tokenizer, before, [], "messages", beside=beside)
        return tokens_behind(self._encode, behind, end, parent.ids[-1])

    def _as_template_reads(self, messages: Sequence[Mapping]) -> list[Mapping]:
        if not any("tool_calls" in message for message in messages):
            return list(messages)
        if self._form is None:
            self._form = next((form for form in FORMS if self._writes(form)), FORMS[0])
        return [_in_form(message, *self._form) for message in messages]

    def _writes(self, form: tuple[bool, str | None]) -> bool:
        """Return whether the chat template accepts a tool call in ``form``, an element of FORMS.

        form: a pair. The first is True if a call's arguments are given as an object, False as a JSON
            text. The second is the ``content`` of a message that has calls and no text: "" or None.
        """
        call = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": json.dumps({TURN: TURN})}}
        calling = _in_form({"role": "assistant", "content": "", "tool_calls": [call]}, *form)
        try:
            text = render_chat(
                self._tokenizer,
                [{"role": "user", "content": "0"}, calling],
                "messages",
                add_generation_prompt=False,
                beside=self._variables,
            )
        except ConfigError:
            return False
        return TURN in text

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """Return one text per token: the token decoded alone."""
        return [self._tokenizer.decode([token]) for token in token_ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)


def _in_form(message: Mapping, as_object: bool, content: str | None) -> Mapping:
    """Return a message with its tool calls in the form that a chat template needs.

    A message without tool calls is returned unchanged.

    as_object: whether arguments become an object instead of a JSON text.
    content: the content of the result if the message's content is empty.
    """
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        with contextlib.suppress(ValueError):  # a policy may write arguments that are no JSON; they stay a text
            arguments = parse_json(arguments, "arguments", error=ValueError) if as_object else arguments
        calls.append({**call, "function": {"name": call["function"]["name"], "arguments": arguments}})
    return {**message, "content": message["content"] or content, "tool_calls": calls}


def reply_of(text: str, request: CompletionRequest, turn_number: int) -> dict:
    """Return a sampled text as the assistant's message. If the request offers tools, calls are moved out of the text.

    turn_number: the number of the answer in its session, which becomes a part of the calls' ids.

    Example: ``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`` → content "" and one
    call of ``add``.
    """
    message: dict[str, object] = {"role": "assistant", "content": text}
    if request.tools is None:
        return message
    calls = []
    for match in CALL.finditer(text):
        try:
            call = parse_json(match[1], "a call", error=ValueError)
        except ValueError:
            return message
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            return message
        function = {"name": call["name"], "arguments": json.dumps(call.get("arguments", {}))}
        calls.append({"id": f"call_{turn_number}_{len(calls)}", "type": "function", "function": function})
    if calls:
        message = {**message, "content": CALL.sub("", text).strip(), "tool_calls": calls}
    return message


def answer(
    request: CompletionRequest, turn: Turn, reply: Mapping, name: str, created: int, names: Sequence[str] | None
) -> dict:
    """Return the body of OpenAI's answer to a request.

    turn: the turn that was recorded for the request.
    reply: the assistant's message.
    name: the answer's id.
    created: seconds since 1970.
    names: each sampled token's text, for log-probs. None: without log-probs.
    """
    num_sampled = len(turn.ids)
    num_prompt = len(turn.token_ids()) - num_sampled
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }
    head = {"id": name, "created": created, "model": request.model, "usage": usage}
    if not request.is_chat:
        choice = {"index": 0, "text": reply["content"], "finish_reason": turn.finish_reason, "logprobs": None}
        return {**head, "object": "text_completion", "choices": [choice]}
    called = "tool_calls" in reply and turn.finish_reason == "stop"
    logprobs = None
    if names is not None:
        content = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(names, turn.logprobs, strict=True)
        ]
        logprobs = {"content": content, "refusal": None}
    message = {**reply, "content": (reply["content"] or None) if called else reply["content"]}
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls" if called else turn.finish_reason,
        "logprobs": logprobs,
    }
    return {**head, "object": "chat.completion", "choices": [choice]}


def chunks(request: CompletionRequest, answered: Mapping) -> list[str]:
    """Return an answer as the events of a stream: the whole message, its finish_reason, usage if asked for, and [DONE].

    answered: the result of ``answer``.
    """
    [choice] = answered["choices"]
    head = {name: answered[name] for name in ("id", "created", "model")}
    if request.is_chat:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(delta["tool_calls"])]
        head["object"] = "chat.completion.chunk"
        first = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": choice["logprobs"]}
        last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}
    else:
        head["object"] = "text_completion"
        first = {**choice, "finish_reason": None}
        last = {**choice, "text": ""}
    events: list[dict] = [{**head, "choices": [first]}, {**head, "choices": [last]}]
    if request.usage_in_stream:
        events.append({**head, "choices": [], "usage": answered["usage"]})
    return [*(f"data: {json.dumps(event)}\n\n" for event in events), "data: [DONE]\n\n"]

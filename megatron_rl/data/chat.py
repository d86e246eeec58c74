"""The tokens of chat messages and of an environment's observations: by the chat template, or as unchanged text.

The policy's turns keep the tokens that were sampled. The text that the template writes after a
turn, such as an observation, is tokenized separately.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from megatron_rl.errors import ConfigError

Message = Mapping[str, object]
ROLES = ("system", "developer", "user", "assistant", "tool")
CONTENTS = 'null to DeepSeek-R1\'s distillates, "" to GLM-4.5, gpt-oss and most others'
THOUGHT_END = "</think>"
TURN = "the-text-of-this-turn"  # in place of a turn's text: a template writes the same after any text


def check_messages(value: object, where: str) -> list[Message]:
    """Return the messages in ``value``, a list of at least one message, each with a role and a content that are texts.

    Null fields, which Arrow fills in, and empty lists of tool calls are left out. An assistant's
    message that calls tools may have a null content or no content field. Its null content is kept,
    since templates treat a null and a missing content differently. Other fields are kept for the
    template.

    Raises ConfigError for a value of another form.

    where: what the messages are (row, column), with which the error's message begins.
    """
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(
            f'{where} is {value!r:.80}; it must be a text, or a list of messages {{"role": ..., "content": ...}}'
        )
    return [_checked(message, f"{where}: message {number}") for number, message in enumerate(value)]


def _checked(message: object, where: str) -> Message:
    fault = ConfigError(f'{where} is {message!r:.80}; it must be {{"role": ..., "content": ...}}, both texts')
    if not isinstance(message, Mapping):
        raise fault
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list | tuple) and all(isinstance(call, Mapping) for call in calls)):
        raise ConfigError(f"{where} has tool_calls={calls!r:.80}; they must be a list of objects")
    silent = bool(calls) and message.get("role") == "assistant"
    empty = {name for name, part in message.items() if part is None and not (silent and name == "content")}
    held = {name: part for name, part in message.items() if name not in empty and (name != "tool_calls" or calls)}
    content = held.get("content")
    if isinstance(content, list | tuple):
        kinds = ", ".join(str(part.get("type")) if isinstance(part, Mapping) else repr(part) for part in content)
        raise ConfigError(
            f"{where} has content parts of the types {kinds:.80}; models here read texts alone: write it as one "
            "text, and leave out rows with images, sound or video"
        )
    if not isinstance(held.get("role"), str) or not (isinstance(content, str) or (silent and content is None)):
        raise fault
    if held["role"] not in ROLES:
        raise ConfigError(f"{where} has role {held['role']!r}; choose one of {', '.join(ROLES)}")
    return held


def said_in(message: Message) -> str:
    """Return a message's text without the thought (reasoning that ends with ``</think>``) that may precede it."""
    return str(message.get("content") or "").split(THOUGHT_END)[-1]


def source_of(tokenizer) -> str:
    """Return the source text of the tokenizer's chat template; several templates are joined by line breaks."""
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


def render_chat(
    tokenizer,
    messages: Sequence[Message],
    where: str,
    *,
    add_generation_prompt: bool,
    beside: Mapping[str, object] | None = None,
) -> str:
    """Return the messages as text, written by the tokenizer's chat template.

    where: what the messages are (row, column), for the ConfigError that is raised if the template
        refuses them.
    add_generation_prompt: whether the text ends with the beginning of an assistant's turn.
    beside: the template's variables other than the messages, such as ``tools``; None for none.
    """
    messages = [dict(message) for message in messages]
    try:
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=False, **(beside or {})
        )
    except Exception as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ConfigError(
            f"{where}: the tokenizer's chat template refuses messages of the roles {roles} ({type(error).__name__}: "
            f"{error}); give messages that it takes{_what_calls_want(messages)}"
        ) from error
    if any(message.get("content", "") is None for message in messages):
        _refuse_written_null(tokenizer, messages, text, where, add_generation_prompt, beside or {})
    return text


def _what_calls_want(messages: Sequence[Message]) -> str:
    """Return advice on how templates want tool calls written, for an error's message; "" if nothing calls tools."""
    calling = [message for message in messages if message.get("tool_calls")]
    if not calling:
        return ""
    content = "" if all(message.get("content") for message in calling) else f"; a call's content: {CONTENTS}"
    return f" (a call's arguments are an object to most templates, a JSON text to DeepSeek's{content})"


def _refuse_written_null(
    tokenizer, messages: list[Message], text: str, where: str, prompt: bool, beside: Mapping[str, object]
) -> None:
    """Raise ConfigError if the template writes a null content as the word None, as GLM-4.5's template does.

    text: the messages as the template writes them.
    where: what the messages are (row, column), for the error.
    prompt: whether the text ends with a generation prompt.
    beside: the template's variables other than the messages.
    """
    said = [{**message, "content": TURN} if message.get("content", "") is None else message for message in messages]
    try:
        instead = tokenizer.apply_chat_template(said, add_generation_prompt=prompt, tokenize=False, **beside)
    except Exception:  # noqa: BLE001 (the template refuses a text beside calls, so null is right)
        return
    if TURN in instead and instead.replace(TURN, "None") == text:
        raise ConfigError(
            f"{where}: the tokenizer's chat template writes the word None for a content that is null beside "
            f"tool_calls; give it {CONTENTS}"
        )


def text_behind_turn(
    tokenizer,
    before: Sequence[Message],
    messages: Sequence[Message],
    where: str,
    *,
    beside: Mapping[str, object] | None = None,
) -> str:
    """Return the text that the template writes after the content of an assistant's turn without tool calls.

    It is the end of the turn, then ``messages``, then a generation prompt. It is the same after any
    content.

    before: the messages before the turn.
    messages: the messages after the turn. If there are none, the result is the end of the turn
        alone, without a generation prompt.
    where: what the messages are (row, column), for errors.
    beside: the template's variables other than the messages; None for none.

    Raises ConfigError for a template that changes the content of turns, or that refuses the
    messages.
    """
    # The stand-in is longer than any run of TURN in the messages, so its last place is the turn's.
    turn = TURN * (1 + max(((message.get("content") or "").count(TURN) for message in messages), default=0))
    conversation = [*before, {"role": "assistant", "content": turn}, *messages]
    rendered = render_chat(tokenizer, conversation, where, add_generation_prompt=bool(messages), beside=beside)
    _, marker, behind = rendered.rpartition(turn)
    if not marker:
        raise ConfigError(
            "the tokenizer's chat template changes an assistant's content; episodes need one that writes it unchanged"
        )
    return behind


def check_stays(
    tokenizer, messages: Sequence[Message], then: Sequence[Message], where: str, beside: Mapping[str, object]
) -> None:
    """Raise ConfigError if the template writes a prompt's messages differently once other messages follow.

    The policy has read the prompt by then, so its text must not change. Mistral's templates write
    tools before the user's last message, and so move the tools.

    messages: the prompt's messages.
    then: the messages after the prompt; the last is not the assistant's.
    where: what the messages are (row, column), for errors.
    beside: the template's variables other than the messages.
    """
    whole = [{**message, "content": said_in(message)} for message in messages]
    plain, prompt = (
        render_chat(tokenizer, whole, where, add_generation_prompt=prompt, beside=beside) for prompt in (False, True)
    )
    rendered = render_chat(tokenizer, [*whole, *then], where, add_generation_prompt=True, beside=beside)
    if not rendered.startswith(os.path.commonprefix([plain, prompt])):
        named = ", ".join([*dict.fromkeys(f"a {message['role']}'s message" for message in messages), *beside])
        raise ConfigError(
            f"{where}: the chat template changes the prompt ({named}) once a message of role {then[-1]['role']!r} "
            "follows, but the policy has already read it unchanged; write tools and system message into the user's "
            "text, answer a turn by role tool, or use a template that leaves them in place"
        )


def tokens_behind(
    encode: Callable[[str], tuple[int, ...]], behind: str, end: str, stop_id: int | None
) -> tuple[int, ...]:
    """Return the tokens between a sampled turn and the next one, without the token that ended the sampled turn.

    A template may end a turn by the first token of the next message (GLM-4.5's
    ``<|observation|>``). It may also end the last turn by another token than earlier turns
    (gpt-oss: ``<|return|>`` and ``<|end|>``). In each case the turn gets one end only.

    encode: called with a text; returns its token ids.
    behind: the text that the template writes after the turn's content.
    end: the same text if no message follows the turn.
    stop_id: the last token of the turn, as sampled; None if unknown.
    """
    token_ids, end_ids = encode(behind), encode(end)
    common = os.path.commonprefix([token_ids, end_ids])
    if stop_id in common:
        return token_ids[common.index(stop_id) + 1 :]
    # Every earlier message ends by the other token, so the token stands again after the next message.
    ends_otherwise = not common and stop_id in end_ids[:1] and token_ids[0] in token_ids[1:]
    return token_ids[1:] if stop_id in token_ids[:1] or ends_otherwise else token_ids


class Observations:
    """Makes the tokens between two turns of the policy from an environment's observation.

    template: ``data.template``.
    role: ``environment.role``, the role of an observation that is a text.
    variables: ``data.template_variables``; None for none.

    With ``template`` "chat" the chat template writes the observation after a turn, with a
    generation prompt. The tokens are those of this text without the turn's end, which the policy
    sampled itself. With any other template the tokens are those of the observation's unchanged
    text.

    Example (ChatML): a turn that ended with the token ``<|im_end|>`` and the observation "408" of
    role tool give the tokens of ``\\n<|im_start|>tool\\n408<|im_end|>\\n<|im_start|>assistant\\n``.
    """

    def __init__(
        self, tokenizer, template: str, role: str = "tool", variables: Mapping[str, object] | None = None
    ) -> None:
        """Raise ConfigError if the chat template does not write an assistant's content unchanged.

        The class describes the arguments.
        """
        self._tokenizer, self._chat, self._role, self._variables = tokenizer, template == "chat", role, variables
        self._end = self._behind_turn([]) if self._chat else ""

    def token_ids(self, observation: str | Sequence[Message], stop_id: int | None) -> tuple[int, ...]:
        """Return the tokens of an observation, a text or a list of messages.

        stop_id: the token that the policy ended its turn with.

        Raises ConfigError for messages without a chat template, and for messages that the template
        refuses.
        """
        if not self._chat:
            if not isinstance(observation, str):
                raise ConfigError("an observation of messages needs data.template=chat; give a text, or set that")
            return self._encode(observation)
        text = isinstance(observation, str)
        messages = (
            [{"role": self._role, "content": observation}] if text else check_messages(observation, "an observation")
        )
        return tokens_behind(self._encode, self._behind_turn(messages), self._end, stop_id)

    def _behind_turn(self, messages: Sequence[Message]) -> str:
        where = f"an observation (environment.role={self._role})"
        before = [{"role": "user", "content": "0"}]
        return text_behind_turn(self._tokenizer, before, messages, where, beside=self._variables)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)

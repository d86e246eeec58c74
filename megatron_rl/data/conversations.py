"""Prompts that are lists of messages: a row's messages, and the variables that the chat template gets with them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence

from megatron_rl.config.data import NO_VARIABLES
from megatron_rl.data.chat import TURN, Message, check_messages, check_stays, render_chat, source_of
from megatron_rl.data.columns import name_of_row
from megatron_rl.data.prompt_texts import VARIABLES, PromptTexts, text_of
from megatron_rl.data.rows import has_column, value_of
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.json_text import parse_json

log = logging.getLogger(__name__)

LISTS = ("tools", "documents")  # template variables that must be lists of objects


class Conversations(PromptTexts):
    """Reads the messages of a data set's rows, and renders prompts by the chat template."""

    is_chat, _warned_of_left_out = True, False

    def messages(self, row: int) -> list[Message]:
        """Return the messages of the prompt of row ``row``.

        ``data.system_prompt`` comes first if the row does not begin with a system message.

        Raises ConfigError for a row without messages, and for a prompt whose last message is the
        assistant's.
        """
        conversation = self._data.messages_key is not None
        key = self._data.messages_key if conversation else self._data.prompt_key
        setting = "data.messages_key" if conversation else "data.prompt_key"
        where = f"{name_of_row(self._rows, row)}: column {key!r} ({setting})"
        if conversation:
            messages = cut_conversation(conversation_of(self._rows, row, key), where)[0]
        else:
            content = text_or_messages(self._rows, row, key, setting)
            messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        if messages[-1]["role"] == "assistant":
            raise ConfigError(
                f"{where} ends with an assistant message, which is the response that the policy samples; end it before "
                "that message"
            )
        if self._data.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._data.system_prompt}, *messages]
        return messages

    def text(self, row: int) -> str:
        """Return the prompt of row ``row`` as text, with the template's generation prompt at its end."""
        setting = "data.prompt_key" if self._data.messages_key is None else "data.messages_key"
        key = self._data.messages_key or self._data.prompt_key
        where = f"{name_of_row(self._rows, row)}: column {key!r} ({setting})"
        messages = self.messages(row)
        text = render_chat(self._tokenizer, messages, where, add_generation_prompt=True, beside=self.beside(row))
        self._warn_of_left_out(messages, text, where)
        return text

    def beside(self, row: int) -> dict[str, object]:
        """Return {name: value} of the variables that the template gets beside the messages of row ``row``.

        They are the run's variables (``data.template_variables``), replaced by the row's own
        (``data.template_columns``). Null variables and null fields of objects are left out.

        Raises ConfigError for tools or documents that are no list of objects.
        """
        variables, columns = dict(self._data.template_variables), self._rows[row]
        for name in self._data.template_columns:
            value = value_of(columns, name) if has_column(columns, name) else None
            if value is None:
                continue
            where = f"{name_of_row(self._rows, row)}: column {name!r} (data.template_columns)"
            if name in (*LISTS, VARIABLES) and isinstance(value, str):
                value = parse_json(value, where)  # in Arrow, objects of different fields are kept as JSON texts
            if isinstance(value, Mapping):
                value = _without_nulls(value)
            if name == VARIABLES:
                variables |= _variables(value, where)
                continue
            if name in LISTS and not (isinstance(value, list) and all(isinstance(part, dict) for part in value)):
                raise ConfigError(f"{where} is {quoted(value)}; it must be a list of objects")
            if name not in LISTS or value:
                variables[name] = value
        return variables

    def check_followed(self, rows: Iterable[int], role: str) -> None:
        """Raise ConfigError if the template writes a row's prompt differently once observations of ``role`` follow it.

        Rows are alike if their messages have the same roles and their variables the same names. Of
        alike rows only the first is checked.

        rows: the numbers of the rows.
        """
        seen = set()
        for row in rows:
            messages, beside = self.messages(row), self.beside(row)
            kind = (*(message["role"] for message in messages), *sorted(beside))
            if kind not in seen:
                then = [{"role": "assistant", "content": TURN}, {"role": role, "content": "0"}]
                where = f"{name_of_row(self._rows, row)} (environment.role={role})"
                check_stays(self._tokenizer, messages, then, where, beside)
            seen.add(kind)

    def _warn_of_left_out(self, messages: Sequence[Message], text: str, where: str) -> None:
        """Warn, once, if ``text``, as the template wrote it, lacks a message's content or tool calls.

        where: the prompt's row and column, for the message.
        """
        number = next((number for number, message in enumerate(messages) if not _is_in(message, text)), None)
        if number is not None and not self._warned_of_left_out:
            log.warning(
                "%s: the chat template does not write message %d, of role %s, as the row has it, so the policy does "
                "not read it; take a template that writes it, or write it into another message",
                where,
                number,
                messages[number]["role"],
            )
            self._warned_of_left_out = True

    def _reads(self, name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", source_of(self._tokenizer)) is not None


def _is_in(message: Message, text: str) -> bool:
    """Return whether ``text``, as the template wrote it, holds a message's content.

    For an assistant's or a tool's message, only the names of the message's tool calls are looked
    for.
    """
    called = [call.get("function", call) for call in message.get("tool_calls", ())]
    if message["role"] in ("assistant", "tool"):  # templates leave thoughts out, and may write a tool's result as JSON
        return all(str(call["name"]) in text for call in called if isinstance(call, Mapping) and "name" in call)
    return message["content"].strip() in text


def _without_nulls(value: Mapping) -> dict[str, object]:
    """Return an object without its null fields; Arrow adds them for fields that only other rows have (data/rows.py)."""
    held = {name: part for name, part in value.items() if part is not None}
    return {name: _without_nulls(part) if isinstance(part, Mapping) else part for name, part in held.items()}


def _variables(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {quoted(value)}; it must be an object of the template's variables")
    taken = next((name for name in value if name in NO_VARIABLES), None)
    if taken is not None:
        raise ConfigError(f"{where} sets {taken!r}, which is no variable of a template; leave it out")
    return value


def text_or_messages(rows: Sequence[Mapping[str, object]], row: int, key: str, setting: str) -> str | list[Message]:
    """Return the text or the messages in column ``key`` of row ``row``. Raises ConfigError for any other value.

    setting: the configuration's key that names the column, such as ``data.prompt_key``, for errors.
    """
    columns = rows[row]
    value = value_of(columns, key) if has_column(columns, key) else None
    if isinstance(value, list):
        return check_messages(value, f"{name_of_row(rows, row)}: column {key!r} ({setting})")
    return text_of(rows, row, key, setting)


def conversation_of(rows: Sequence[Mapping[str, object]], row: int, key: str) -> list[Message]:
    """Return the messages in column ``key`` of row ``row``, which holds a list, or the list as JSON text.

    Raises ConfigError for any other value.

    key: ``data.messages_key``.
    """
    value = text_or_messages(rows, row, key, "data.messages_key")
    if not isinstance(value, str):
        return value
    where = f"{name_of_row(rows, row)}: column {key!r} (data.messages_key)"
    return check_messages(parse_json(value, where), where)


def cut_conversation(messages: Sequence[Message], where: str) -> tuple[list[Message], list[Message]]:
    """Return two lists: the messages before the assistant's first, and the messages from its first to its last.

    Raises ConfigError if one of the lists would be empty.

    where: the conversation's row and column, for the error.
    """
    own = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not own or own[0] == 0:
        roles = ", ".join(message["role"] for message in messages)
        raise ConfigError(
            f"{where} has messages of the roles {roles}; a conversation begins with another's message and holds one of "
            "the assistant's, which carries the loss"
        )
    return list(messages[: own[0]]), list(messages[own[0] : own[-1] + 1])

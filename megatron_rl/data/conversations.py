"""The rows' conversations: a row's messages, and what the chat template is given beside them."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Mapping, Sequence

from megatron_rl.config import DataConfig
from megatron_rl.config.data import AUTO, NO_VARIABLES
from megatron_rl.data.chat import TURN, Message, check_messages, check_stays, render_chat, source_of
from megatron_rl.data.columns import name_of_row, names_of
from megatron_rl.data.rows import has_column, value_of
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.json_text import parse_json

log = logging.getLogger(__name__)

VARIABLES = "chat_template_kwargs"  # the column of an object of variables, by the name that TRL gives it
LISTS = ("tools", "documents")  # variables that every template takes as a list of objects
# Columns of a known meaning, and the setting that would read them.
KNOWN = {
    "tools": "data.template=chat, and name it in data.template_columns",
    "documents": "data.template=chat, and name it in data.template_columns",
    VARIABLES: "data.template=chat, and name it in data.template_columns",
    "messages": "data.messages_key=messages, or data.prompt_key=messages",
    "images": "none here: models read texts alone",
    "videos": "none here: models read texts alone",
    "audios": "none here: models read texts alone",
}


def settle_template(rows: Sequence[Mapping[str, object]], data: DataConfig) -> DataConfig:
    """Return the section with ``data.template=auto`` settled by the first row: ``chat`` for messages, else its text.

    Raises ConfigError for a setting of the chat template beside prompts that are texts.
    """
    if data.template != AUTO:
        return data
    first = rows[0] if rows else {}
    prompt = value_of(first, data.prompt_key) if has_column(first, data.prompt_key) else None
    if data.messages_key is not None or isinstance(prompt, list):
        return dataclasses.replace(data, template="chat")
    for key, value in {"system_prompt": data.system_prompt, "template_variables": data.template_variables}.items():
        if value:
            raise ConfigError(
                f"data.{key}={quoted(value)} is for a chat template, and the prompts of data.prompt_key="
                f"{quoted(data.prompt_key)} are texts; set data.template=chat to make each a user's message"
            )
    return dataclasses.replace(data, template="{prompt}")


class Conversations:
    """Reads the messages of a data set's rows, and renders those of a prompt.

    rows, tokenizer, data: those of the data set.
    """

    def __init__(self, rows: Sequence[Mapping[str, object]], tokenizer, data: DataConfig) -> None:
        """Raise ConfigError for a column of ``data.template_columns`` that no row has; warn of those that nobody reads.

        The columns that the setting names by itself may be absent.
        """
        self._rows, self._tokenizer, self._data, self._warned = rows, tokenizer, data, False
        given = DataConfig().template_columns
        for name in data.template_columns:
            if name not in given and not any(has_column(columns, name) for columns in rows):
                raise ConfigError(
                    f"data.template_columns names {name!r}, which no row has; the columns of row 0 are "
                    f"{names_of(rows[0])}. Name one of them"
                )
        self._warn()

    @property
    def is_chat(self) -> bool:
        return self._data.template == "chat"

    def asked(self, row: int) -> list[Message]:
        """Return the messages of a row's prompt. Raises ConfigError for a row without any, or that the assistant ends.

        They begin with ``data.system_prompt`` where the row has no system message of its own.
        """
        conversation = self._data.messages_key is not None
        key = self._data.messages_key if conversation else self._data.prompt_key
        setting = "data.messages_key" if conversation else "data.prompt_key"
        where = f"{name_of_row(self._rows, row)}: column {key!r} ({setting})"
        if conversation:
            messages = cut_conversation(conversation_of(self._rows, row, key), where)[0]
        else:
            content = text_or_messages(self._rows, row, key, setting, messages=True)
            messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        if messages[-1]["role"] == "assistant":
            raise ConfigError(
                f"{where} ends in an assistant's message, and the response is what the assistant says; end it before "
                "that"
            )
        if self._data.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._data.system_prompt}, *messages]
        return messages

    def beside(self, row: int) -> dict[str, object]:
        """Return the variables that the template is given beside a row's messages: the run's, then the row's own.

        A null one is left out, and so is a null field of an object. Raises ConfigError for tools or documents that are
        no list of objects.
        """
        found, columns = dict(self._data.template_variables), self._rows[row]
        for name in self._data.template_columns:
            value = value_of(columns, name) if has_column(columns, name) else None
            if value is None:
                continue
            where = f"{name_of_row(self._rows, row)}: column {name!r} (data.template_columns)"
            if name in (*LISTS, VARIABLES) and isinstance(value, str):
                value = parse_json(value, where)  # Arrow's way to hold objects of different fields
            if isinstance(value, Mapping):
                value = _without_nulls(value)
            if name == VARIABLES:
                found |= _variables(value, where)
                continue
            if name in LISTS and not (isinstance(value, list) and all(isinstance(part, dict) for part in value)):
                raise ConfigError(f"{where} is {quoted(value)}; it must be a list of objects")
            if name not in LISTS or value:
                found[name] = value
        return found

    def text(self, row: int) -> str:
        """Return a row's prompt as text, with the template's generation prompt behind a chat."""
        if self.is_chat:
            setting = "data.prompt_key" if self._data.messages_key is None else "data.messages_key"
            key = self._data.messages_key or self._data.prompt_key
            where = f"{name_of_row(self._rows, row)}: column {key!r} ({setting})"
            asked = self.asked(row)
            text = render_chat(self._tokenizer, asked, where, add_generation_prompt=True, beside=self.beside(row))
            self._warn_of_left_out(asked, text, where)
            return text
        content = text_or_messages(self._rows, row, self._data.prompt_key, "data.prompt_key", messages=False)
        # Not str.format: a dataset's prompts, and templates with LaTeX or JSON in them, are full of braces.
        return self._data.template.replace("{prompt}", content)

    def check_followed(self, rows: Iterable[int], role: str) -> None:
        """Raise ConfigError for a row whose prompt the template writes otherwise once observations of a role follow it.

        One row is looked at of those that have the same roles and the same variables.
        """
        seen = set()
        for row in rows:
            asked, beside = self.asked(row), self.beside(row)
            kind = (*(message["role"] for message in asked), *sorted(beside))
            if kind not in seen:
                then = [{"role": "assistant", "content": TURN}, {"role": role, "content": "0"}]
                where = f"{name_of_row(self._rows, row)} (environment.role={role})"
                check_stays(self._tokenizer, asked, then, where, beside)
            seen.add(kind)

    def _warn_of_left_out(self, asked: Sequence[Message], text: str, where: str) -> None:
        """Warn, once, of a message that the template leaves out, or whose calls it leaves out."""
        number = next((number for number, message in enumerate(asked) if not _is_in(message, text)), None)
        if number is not None and not self._warned:
            log.warning(
                "%s: the chat template does not write message %d, of role %s, as the row has it, so the policy does "
                "not read it; take a template that writes it, or write it into another message",
                where,
                number,
                asked[number]["role"],
            )
            self._warned = True

    def _warn(self) -> None:
        """Warn of columns of a known meaning that are not read, and of variables that the template does not read."""
        data, named = self._data, self._data.template_columns if self.is_chat else ()
        read = {*named, data.prompt_key, data.messages_key, data.solution_key, data.answer_key}
        for name, way in KNOWN.items():
            row = next((row for row, columns in enumerate(self._rows) if columns.get(name)), None)
            if row is None:
                continue
            if name not in read:
                log.warning("%s: column %r is not read; to read it: %s", name_of_row(self._rows, row), name, way)
            elif name in named and name != VARIABLES and not _reads(self._tokenizer, name):
                log.warning(
                    "%s: column %r is not read: the tokenizer's chat template does not name it; take one that does, "
                    "or leave it out of data.template_columns",
                    name_of_row(self._rows, row),
                    name,
                )


def _is_in(message: Message, text: str) -> bool:
    """Return whether a text holds what a message says; of calls, their functions' names."""
    called = [call.get("function", call) for call in message.get("tool_calls", ())]
    if message["role"] in ("assistant", "tool"):  # thoughts are left out, and a tool's result may be written as JSON
        return all(str(call["name"]) in text for call in called if isinstance(call, Mapping) and "name" in call)
    return message["content"].strip() in text


def _without_nulls(value: Mapping) -> dict[str, object]:
    """Return an object without its null fields, which Arrow fills in for another row's (data/rows.py)."""
    held = {name: part for name, part in value.items() if part is not None}
    return {name: _without_nulls(part) if isinstance(part, Mapping) else part for name, part in held.items()}


def _variables(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {quoted(value)}; it must be an object of the template's variables")
    taken = next((name for name in value if name in NO_VARIABLES), None)
    if taken is not None:
        raise ConfigError(f"{where} sets {taken!r}, which is no variable of a template; leave it out")
    return value


def _reads(tokenizer, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", source_of(tokenizer)) is not None


def text_or_messages(
    rows: Sequence[Mapping[str, object]], row: int, key: str, setting: str, *, messages: bool
) -> str | list[Message]:
    """Return a column that holds text or, where ``messages`` allows it, messages; raise ConfigError otherwise."""
    columns, name = rows[row], name_of_row(rows, row)
    if not has_column(columns, key):
        raise ConfigError(f"{name} has no column {key!r} ({setting}); its columns are {names_of(columns)}")
    value = value_of(columns, key)
    if messages and isinstance(value, list):
        return check_messages(value, f"{name}: column {key!r} ({setting})")
    if not isinstance(value, str):
        kind = type(value).__name__
        wanted = "text; a list of messages needs data.template=chat" if isinstance(value, list) else "text"
        raise ConfigError(f"{name}: column {key!r} ({setting}) is a {kind}, {value!r:.80}; it must be {wanted}")
    return value


def conversation_of(rows: Sequence[Mapping[str, object]], row: int, key: str) -> list[Message]:
    """Return the messages of ``data.messages_key``; a text is their JSON. Raises ConfigError for anything else."""
    value = text_or_messages(rows, row, key, "data.messages_key", messages=True)
    if not isinstance(value, str):
        return value
    where = f"{name_of_row(rows, row)}: column {key!r} (data.messages_key)"
    return check_messages(parse_json(value, where), where)


def cut_conversation(messages: Sequence[Message], where: str) -> tuple[list[Message], list[Message]]:
    """Return a conversation's messages before the assistant's first, and from there to the assistant's last.

    where: begins the message of the ConfigError that is raised where there is no assistant's message, or none before.
    """
    own = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not own or own[0] == 0:
        roles = ", ".join(message["role"] for message in messages)
        raise ConfigError(
            f"{where} has messages of the roles {roles}; a conversation begins with another's message and holds one of "
            "the assistant's, which carries the loss"
        )
    return list(messages[: own[0]]), list(messages[own[0] : own[-1] + 1])

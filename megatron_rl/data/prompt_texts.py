"""The prompts of rows as texts, and warnings about columns that nothing reads."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

from megatron_rl.config import DataConfig
from megatron_rl.config.data import AUTO
from megatron_rl.data.columns import name_of_row, names_of
from megatron_rl.data.rows import has_column, value_of
from megatron_rl.errors import ConfigError, quoted

log = logging.getLogger(__name__)

VARIABLES = "chat_template_kwargs"  # a column of objects with template variables; the name is TRL's
# Columns whose meaning is known → what a warning says of reading them.
KNOWN = {
    "tools": "to read it, set data.template=chat and name it in data.template_columns",
    "documents": "to read it, set data.template=chat and name it in data.template_columns",
    VARIABLES: "to read it, set data.template=chat and name it in data.template_columns",
    "messages": "to read it, set data.messages_key=messages or data.prompt_key=messages",
    "images": "models here read texts alone",
    "videos": "models here read texts alone",
    "audios": "models here read texts alone",
}


def settle_template(rows: Sequence[Mapping[str, object]], data: DataConfig) -> DataConfig:
    """Return the ``data`` section with ``template=auto`` replaced, as the first row decides.

    The template is ``chat`` if the first prompt is a list of messages, else ``{prompt}``.

    Raises ConfigError if prompts are texts and a setting of the chat template is given.
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


class PromptTexts:
    """Reads prompts that are texts from a data set's rows (data/conversations.py reads messages).

    rows: the rows of the data set.
    tokenizer: a Hugging Face tokenizer.
    data: the run's ``data`` section.
    """

    is_chat = False

    def __init__(self, rows: Sequence[Mapping[str, object]], tokenizer, data: DataConfig) -> None:
        """Raise ConfigError for a column of ``data.template_columns`` that no row has; warn of columns not read.

        The default columns of ``data.template_columns`` may be absent.
        """
        self._rows, self._tokenizer, self._data = rows, tokenizer, data
        by_default = DataConfig().template_columns
        for name in data.template_columns:
            if name not in by_default and not any(has_column(columns, name) for columns in rows):
                raise ConfigError(
                    f"data.template_columns names {name!r}, which no row has; the columns of row 0 are "
                    f"{names_of(rows[0])}. Name one of them"
                )
        self._warn()

    def messages(self, row: int) -> list[Mapping[str, object]] | None:
        """Return None, since prompts are texts here.

        A subclass with prompts of messages returns the messages of row ``row``.
        """
        return None

    def text(self, row: int) -> str:
        """Return the prompt of row ``row``: the text of its prompt column, put into the run's template."""
        content = text_of(self._rows, row, self._data.prompt_key, "data.prompt_key")
        # Not str.format: prompts, and templates with LaTeX or JSON, are full of braces.
        return self._data.template.replace("{prompt}", content)

    def _warn(self) -> None:
        """Warn of columns that nothing reads although their names, such as ``tools``, have a known meaning.

        Also warn of columns in ``data.template_columns`` that the chat template does not use.
        """
        data, named = self._data, self._data.template_columns if self.is_chat else ()
        read = {*named, data.prompt_key, data.messages_key, data.solution_key, data.answer_key}
        for name, way in KNOWN.items():
            row = next((row for row, columns in enumerate(self._rows) if columns.get(name)), None)
            if row is None:
                continue
            if name not in read:
                log.warning("%s: column %r is not read: %s", name_of_row(self._rows, row), name, way)
            elif name in named and name != VARIABLES and not self._reads(name):
                log.warning(
                    "%s: column %r is not read: the tokenizer's chat template does not name it; take one that does, "
                    "or leave it out of data.template_columns",
                    name_of_row(self._rows, row),
                    name,
                )

    def _reads(self, name: str) -> bool:
        """Return whether the chat template uses a variable named ``name``; False here, without a chat template."""
        return False


def text_of(rows: Sequence[Mapping[str, object]], row: int, key: str, setting: str) -> str:
    """Return the text in column ``key`` of row ``row``. Raises ConfigError if the column is missing or holds no text.

    setting: the configuration's key that names the column, such as ``data.prompt_key``, for errors.
    """
    columns, name = rows[row], name_of_row(rows, row)
    if not has_column(columns, key):
        raise ConfigError(f"{name} has no column {key!r} ({setting}); its columns are {names_of(columns)}")
    value = value_of(columns, key)
    if not isinstance(value, str):
        kind = type(value).__name__
        wanted = "text; a list of messages needs data.template=chat" if isinstance(value, list) else "text"
        raise ConfigError(f"{name}: column {key!r} ({setting}) is a {kind}, {value!r:.80}; it must be {wanted}")
    return value

"""The responses that supervised steps train: a solution, or a chosen and a rejected one, checked and tokenized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from megatron_rl.config import DataConfig
from megatron_rl.data.chat import Message, check_messages
from megatron_rl.data.columns import name_of_row, names_of
from megatron_rl.data.rows import has_column, value_of
from megatron_rl.data.solution import Solution, tokenize_solution
from megatron_rl.data.token_limits import TokenLimits
from megatron_rl.errors import ConfigError
from megatron_rl.types import Prompt


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


class Responses:
    """Reads and tokenizes the responses of a data set's rows.

    rows, tokenizer, data, limits: those of the data set.
    """

    def __init__(self, rows: Sequence[Mapping[str, object]], tokenizer, data: DataConfig, limits: TokenLimits) -> None:
        self._rows, self._tokenizer, self._data, self._limits = rows, tokenizer, data, limits

    def require_end(self) -> None:
        """Raise ConfigError where the tokenizer has no token that could end a response."""
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(
                "the tokenizer has no eos_token and a solution must end in one; set it in tokenizer_config.json"
            )

    def given(self, row: int, key: str, setting: str) -> str | list[Message]:
        """Return a row's response in a column: a text, or messages of which the first and last are the assistant's.

        Messages that begin with those of the row's prompt lose them. Raises ConfigError for anything else.
        """
        if self._data.messages_key is not None and key == self._data.solution_key:
            key, setting = self._data.messages_key, "data.messages_key"
            messages = text_or_messages(self._rows, row, key, setting, messages=True)
            return self._turns(cut_conversation(messages, self._where(row, key, setting))[1], row, key, setting)
        value = text_or_messages(self._rows, row, key, setting, messages=True)
        return value if isinstance(value, str) else self._turns(self._without_prompt(value, row), row, key, setting)

    def _turns(self, messages: list[Message], row: int, key: str, setting: str) -> list[Message]:
        roles = [message["role"] for message in messages]
        if not roles or roles[0] != "assistant" or roles[-1] != "assistant":
            raise ConfigError(
                f"{self._where(row, key, setting)} has messages of the roles {', '.join(roles)}; it begins and ends "
                "with the assistant's"
            )
        if any(one == two == "assistant" for one, two in zip(roles, roles[1:], strict=False)):
            raise ConfigError(
                f"{self._where(row, key, setting)} has two messages of the assistant's in a row, and a turn ends where "
                "another speaks; join them"
            )
        return messages

    def _without_prompt(self, messages: list[Message], row: int) -> list[Message]:
        columns, key = self._rows[row], self._data.prompt_key
        prompt = value_of(columns, key) if has_column(columns, key) else None
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if isinstance(asked, list) and messages[: len(asked)] == asked:
            return messages[len(asked) :]
        return messages

    def _where(self, row: int, key: str, setting: str) -> str:
        return f"{name_of_row(self._rows, row)}: column {key!r} ({setting})"

    def tokenized(self, prompt: Prompt, row: int, key: str, setting: str) -> Solution:
        """Return a row's response as tokens behind its prompt.

        Raises ConfigError for one that does not fit in the model's context, or with a token that the model lacks.
        """
        given = self.given(row, key, setting)
        length = len(given) if isinstance(given, str) else sum(len(message["content"]) for message in given)
        context = self._limits.context_tokens
        if context is not None and self._limits.is_endless(length, context):
            self._refuse_long(row, key, f"more than {length} characters")
        solution = tokenize_solution(prompt, given, self._tokenizer, self._data.template)
        self._limits.check_vocabulary(name_of_row(self._rows, row), key, solution.response_ids)
        total = len(prompt.token_ids) + len(solution.response_ids)
        if context is not None and total > context:
            self._refuse_long(row, key, f"{total} tokens (end-of-sequence included)")
        return solution

    def _refuse_long(self, row: int, key: str, size: str) -> NoReturn:
        raise TooLong(
            f"{name_of_row(self._rows, row)}: prompt and {key} have {size} and the model's context "
            f"{self._limits.context_tokens}; remove the row, set data.on_long_prompt=drop, or take a model with a "
            "longer context"
        )


class TooLong(ConfigError):
    """Reports a response that does not fit in the model's context behind its prompt."""

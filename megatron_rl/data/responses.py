"""The responses that supervised steps train on, checked and tokenized: a solution, or a chosen and a rejected one."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import NoReturn

from megatron_rl.config import DataConfig
from megatron_rl.data.chat import THOUGHT_END, Message, Observations, check_messages
from megatron_rl.data.columns import name_of_row
from megatron_rl.data.conversations import conversation_of, cut_conversation, text_or_messages
from megatron_rl.data.prompt_texts import PromptTexts
from megatron_rl.data.rows import has_column, value_of
from megatron_rl.data.solution import Solution
from megatron_rl.data.token_limits import TokenLimits
from megatron_rl.data.turns import TurnFinder, Turns, words_of
from megatron_rl.errors import ConfigError
from megatron_rl.types import Prompt

log = logging.getLogger(__name__)
THOUGHTS = (THOUGHT_END, "<|channel|>analysis")  # marks of a thought, even an empty one, in what templates write


class Responses:
    """Reads the responses in a data set's rows, and tokenizes them.

    rows: the rows of the data set.
    tokenizer: a Hugging Face tokenizer.
    data: the run's ``data`` section.
    conversations: the reader of the rows' prompts.
    limits: the model's limits on tokens.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, object]],
        tokenizer,
        data: DataConfig,
        conversations: PromptTexts,
        limits: TokenLimits,
    ) -> None:
        self._rows, self._tokenizer, self._data, self._limits = rows, tokenizer, data, limits
        self._conversations = conversations
        self._warned: set[str] = set()
        self._words = words_of(tokenizer) if conversations.is_chat else None

    def require_end(self) -> None:
        """Raise ConfigError if no token can end a response: there is neither a chat template nor an end of sequence."""
        if self._tokenizer.eos_token_id is None and not self._conversations.is_chat:
            raise ConfigError(
                "the tokenizer has no eos_token and a solution must end in one; set it in tokenizer_config.json"
            )

    def given(self, row: int, key: str, setting: str) -> str | list[Message]:
        """Return the response in column ``key`` of row ``row``: a text, or a list of messages.

        If the column's messages begin with the messages of the prompt, the prompt's messages are
        removed.

        setting: the configuration's key that names the column, such as ``data.solution_key``.

        Raises ConfigError for any other value, and for messages of which the first or the last is
        not the assistant's.
        """
        key, setting = self._column(key, setting)
        if setting == "data.messages_key":
            messages = conversation_of(self._rows, row, key)
            return self._turns(cut_conversation(messages, self._where(row, key, setting))[1], row, key, setting)
        value = text_or_messages(self._rows, row, key, setting)
        return value if isinstance(value, str) else self._turns(self._without_prompt(value, row), row, key, setting)

    def _column(self, key: str, setting: str) -> tuple[str, str]:
        """Return (the column from which a response is read, the setting that names this column).

        They are ``key`` and ``setting`` themselves, unless ``data.messages_key`` is set and ``key``
        is ``data.solution_key``. Then the column that ``data.messages_key`` names is read.
        """
        if self._data.messages_key is not None and key == self._data.solution_key:
            return self._data.messages_key, "data.messages_key"
        return key, setting

    def _turns(self, messages: list[Message], row: int, key: str, setting: str) -> list[Message]:
        roles = [message["role"] for message in messages]
        if not roles or roles[0] != "assistant" or roles[-1] != "assistant":
            raise ConfigError(
                f"{self._where(row, key, setting)} has messages of the roles {', '.join(roles)}; it must begin and "
                "end with an assistant message"
            )
        if any(one == two == "assistant" for one, two in zip(roles, roles[1:], strict=False)):
            raise ConfigError(
                f"{self._where(row, key, setting)} has two assistant messages in a row; join them into one"
            )
        return messages

    def _without_prompt(self, messages: list[Message], row: int) -> list[Message]:
        columns, key = self._rows[row], self._data.prompt_key
        prompt = value_of(columns, key) if has_column(columns, key) else None
        first = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if isinstance(first, list):
            first = check_messages(first, self._where(row, self._data.prompt_key, "data.prompt_key"))
        if isinstance(first, list) and messages[: len(first)] == first:
            return messages[len(first) :]
        return messages

    def _where(self, row: int, key: str, setting: str) -> str:
        return f"{name_of_row(self._rows, row)}: column {key!r} ({setting})"

    def tokenized(self, prompt: Prompt, row: int, key: str, setting: str) -> Solution:
        """Return the response in column ``key`` of row ``row`` as tokens after ``prompt``.

        Raises TooLong for a response that does not fit in the model's context, and ConfigError for
        a token that the model lacks.

        setting: the configuration's key that names the column, such as ``data.solution_key``.
        """
        # Too long by its characters: refused before it is tokenized.
        response = self.given(row, key, setting)
        key, setting = self._column(key, setting)
        length = (
            len(response)
            if isinstance(response, str)
            else sum(len(message.get("content") or "") for message in response)
        )
        context = self._limits.context_tokens
        if context is not None and self._limits.is_endless(length, context):
            self._refuse_long(row, key, f"more than {length} characters")
        # Tokenized, and checked against vocabulary and context.
        solution = self._solution(prompt, response, row, self._where(row, key, setting))
        self._limits.check_vocabulary(name_of_row(self._rows, row), key, solution.response_ids)
        total = len(prompt.token_ids) + len(solution.response_ids)
        if context is not None and total > context:
            self._refuse_long(row, key, f"{total} tokens (end-of-sequence included)")
        return solution

    def _solution(self, prompt: Prompt, response: str | list[Message], row: int, where: str) -> Solution:
        if not self._conversations.is_chat:
            if not isinstance(response, str) and any(message.get("tool_calls") for message in response):
                raise ConfigError(
                    f"{where} has tool_calls, which a chat template writes; set data.template=chat, or write the calls "
                    "into the content"
                )
            return tokenize_solution(prompt, response, self._tokenizer, self._data.template)
        messages = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
        prompts, beside = self._conversations.messages(row), self._conversations.beside(row)
        turns = TurnFinder(self._tokenizer, self._words, prompts, messages, beside, where).turns()
        self._warn_of_thoughts(turns, where)
        self._warn_of_nothing(messages, where)
        return tokenize_turns(prompt, turns, self._tokenizer, masked=not isinstance(response, str))

    def _warn_of_thoughts(self, turns: Turns, where: str) -> None:
        """Warn, once, of a template that writes a thought (reasoning) in the last turn and none in an earlier turn.

        where: the conversation's row and column, for the message.
        """
        *earlier, last = (turns.text[first:end] for first, end in turns.spans)
        mark = next((mark for mark in THOUGHTS if mark in last and not all(mark in turn for turn in earlier)), None)
        if mark is not None and "thoughts" not in self._warned:
            log.warning(
                "%s: the chat template writes a thought (%s) in the assistant's last turn and none in an earlier one, "
                "which is trained without; to train every turn as it is said, give each a row that ends with it",
                where,
                mark,
            )
            self._warned.add("thoughts")

    def _warn_of_nothing(self, messages: Sequence[Message], where: str) -> None:
        """Warn, once, of an assistant's message that has neither text nor tool calls.

        where: the messages' row and column, for the message.
        """
        own = [message for message in messages if message["role"] == "assistant" and not message.get("tool_calls")]
        empty = next((message for message in own if not message["content"].strip()), None)
        if empty is not None and "nothing" not in self._warned:
            log.warning(
                "%s has an assistant's message without text and tool_calls (its fields: %s), which trains the turn's "
                "end alone; fill it, or leave the row out",
                where,
                ", ".join(empty),
            )
            self._warned.add("nothing")

    def _refuse_long(self, row: int, key: str, size: str) -> NoReturn:
        raise TooLong(
            f"{name_of_row(self._rows, row)}: prompt and {key} have {size} and the model's context "
            f"{self._limits.context_tokens}; remove the row, set data.on_long_prompt=drop, or take a model with a "
            "longer context"
        )


class TooLong(ConfigError):
    """Reports a response that does not fit in the model's context after its prompt."""


def tokenize_solution(prompt: Prompt, response: str | Sequence[Message], tokenizer, template: str) -> Solution:
    """Return the tokens of a response without a chat template, with a loss on the assistant's turns alone.

    Every turn of the assistant ends in the tokenizer's end of sequence. Other messages are
    tokenized as unchanged text.

    prompt: a prompt that is a text.
    response: a text, or messages of which the first and the last are the assistant's.
    template: ``data.template``, a text with ``{prompt}`` in it, not "chat".
    """

    def turn(text: str) -> tuple[int, ...]:
        return (*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id)

    if isinstance(response, str):
        return Solution(prompt=prompt, response_ids=turn(response))
    observations = Observations(tokenizer, template)
    token_ids: list[int] = []
    mask: list[bool] = []
    waiting = ""
    for message in response:
        if message["role"] != "assistant":
            waiting += message["content"]
            continue
        between = observations.token_ids(waiting, tokenizer.eos_token_id)
        said, waiting = turn(message["content"]), ""
        token_ids += (*between, *said)
        mask += [False] * len(between) + [True] * len(said)
    return Solution(prompt=prompt, response_ids=tuple(token_ids), loss_mask=tuple(mask))


def tokenize_turns(prompt: Prompt, turns: Turns, tokenizer, *, masked: bool) -> Solution:
    """Return the tokens of a conversation that the chat template wrote, with a loss on the assistant's turns alone.

    Each turn is tokenized apart from the text before it, as when the policy generates. The prompt
    is the text before the first turn. It may be shorter than the row's prompt: a generation prompt
    may end in text, such as an opened ``<think>``, that is not written before a finished turn.

    prompt: the row's prompt.
    turns: the conversation's text and the character ranges of its turns.
    masked: whether the result has a loss mask; False only for a response of one turn.
    """

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    behind = turns.spans[0][0]
    if turns.text[:behind] != prompt.text:
        text = turns.text[:behind]
        prompt = dataclasses.replace(prompt, text=text, token_ids=tuple(encode(text)))
    token_ids: list[int] = []
    mask: list[bool] = []
    for first, last in turns.spans:
        between, said = encode(turns.text[behind:first]) if first > behind else [], encode(turns.text[first:last])
        token_ids += [*between, *said]
        mask += [False] * len(between) + [True] * len(said)
        behind = last
    return Solution(prompt=prompt, response_ids=tuple(token_ids), loss_mask=tuple(mask) if masked else None)

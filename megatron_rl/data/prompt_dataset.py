"""Rows to prompts: tokenized at the start, drawn in an order that is the same on every rank, by a resumable cursor."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.config import DataConfig
from megatron_rl.data.columns import ANSWER, RequiredColumn, check_columns, name_of_row
from megatron_rl.data.order import Order, shares
from megatron_rl.data.prompt_texts import PromptTexts, settle_template
from megatron_rl.data.rows import Rows, has_column, value_of
from megatron_rl.data.token_limits import TokenLimits
from megatron_rl.errors import ConfigError
from megatron_rl.types import Prompt

if TYPE_CHECKING:  # of supervised steps
    from megatron_rl.data.responses import Responses
    from megatron_rl.data.solution import Solution

# The fast tokenizers are parallel over a list, and a list of this length stays small in memory.
_ROWS_PER_TOKENIZER_CALL = 1024

_POSITIONS = ("prompts", "solutions", "returned")  # of a saved cursor; its other fields fix the order


def _place_of(prompt_id: str) -> tuple[int, int]:
    """Return (row, epoch) of ``"<row>@<epoch>"``."""
    row, epoch = prompt_id.split("@")
    return int(row), int(epoch)


def _held_out(rows: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Return the given share of the rows, at least one if the share is above 0, as the seed draws them."""
    if not share:
        return rows[:0]
    count = max(1, round(share * len(rows)))
    if count >= len(rows):
        raise ConfigError(
            f"sft.eval_share={share:g} holds out {count} of {len(rows)} rows, which leaves none to train; lower it"
        )
    key = np.array([seed % 2**64, 2**64 - 1], dtype=np.uint64)  # no epoch's order has this stream
    return np.sort(np.random.Generator(np.random.Philox(key=key)).choice(rows, count, replace=False))


def _prompt_texts(rows: Sequence[Mapping[str, object]], tokenizer, data: DataConfig) -> PromptTexts:
    match data.template:
        case "chat":
            from megatron_rl.data.conversations import Conversations

            return Conversations(rows, tokenizer, data)
        case _:
            return PromptTexts(rows, tokenizer, data)


class PromptDataset:
    """Draws the prompts of a dataset in a reproducible order, epoch after epoch.

    The order is that of data/order.py: a permutation of the rows per epoch, drawn from (seed,
    epoch) alone, or under ``data.weights`` a mixture of the sources.

    rows:           the dataset, see `load_rows`; row numbers in ids and messages count from 0 in
                    this list.
    tokenizer:      a Hugging Face tokenizer.
    context_tokens: the model's context in tokens, None for no limit; a prompt must leave room in it
        for one more token.
    vocab_size:     the number of tokens that the model knows, None for no limit.
    required:       the columns that every row must have beside the prompt.
    held_out_share: the share of the rows, drawn by the seed, that are never drawn; see
        ``held_out_solutions``.
    responses:      (column, setting) of each response that supervised steps read: all rows' are
                    checked at once.
    followed_by:    the role of the observations that follow a prompt's turns, whose prompts are
                    checked; None: none do.

    Every row is tokenized here, so that a bad row ends the run before its first step and not in the
    middle of it. Raises ConfigError for a row without ``data.prompt_key`` or another column that it
    must have (data/columns.py), a prompt that is neither text nor, under ``data.template=chat``, a
    list of messages ``{"role": ..., "content": ...}``, an empty prompt, a token that the model does
    not know, a prompt over the limit (``data.on_long_prompt=fail``), or when no row is left
    (``drop``; see ``num_dropped``). A response that does not fit in the context behind its prompt
    is over the limit too.

    ``data`` is the given section with ``data.template=auto`` settled. ``Prompt.columns`` is the row. Where
    ``data.answer_key`` is not "answer", the column it names, or the field within one, is also given as "answer", the
    name that the built-in reward functions read.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, object]],
        tokenizer,
        data: DataConfig,
        seed: int,
        context_tokens: int | None = None,
        vocab_size: int | None = None,
        required: Sequence[RequiredColumn] = (),
        held_out_share: float = 0.0,
        responses: Sequence[tuple[str, str]] = (),
        followed_by: str | None = None,
    ) -> None:
        data = settle_template(rows, data)
        if data.template == "chat" and tokenizer.chat_template is None:
            raise ConfigError(
                "data.template='chat' and the tokenizer has no chat template; use a text with {prompt} in it"
            )
        self.num_dropped = 0
        self._rows = rows
        self._tokenizer = tokenizer
        self._data = self.data = data
        self._seed = seed
        self._limits = TokenLimits(tokenizer, context_tokens, vocab_size)
        if data.messages_key is None:
            check_columns(rows, required, data.prompt_key, data.answer_key)
        else:
            check_columns(rows, required, data.messages_key, data.answer_key, prompt_setting="data.messages_key")
        self._texts = _prompt_texts(rows, tokenizer, data)
        # int32 arrays, not tuples: a dataset of a million prompts stays well under a gigabyte.
        self._token_ids: dict[int, np.ndarray] = {}
        for start in range(0, len(rows), _ROWS_PER_TOKENIZER_CALL):
            self._admit(range(start, min(start + _ROWS_PER_TOKENIZER_CALL, len(rows))))
        for key, setting in responses:
            self._admit_responses(key, setting)
        if followed_by is not None and self._texts.is_chat:
            self._texts.check_followed(self._token_ids, followed_by)
        if not self._token_ids:
            raise ConfigError(
                f"no prompt is left: all {len(rows)} rows are longer than {self._limit()[0]} tokens "
                f"({self._limit()[1]}) and data.on_long_prompt='drop'; raise the limit or shorten the prompts"
            )
        self._kept = np.fromiter(self._token_ids, dtype=np.int64)
        self._held_out = _held_out(self._kept, held_out_share, seed)
        self._kept = np.setdiff1d(self._kept, self._held_out)
        self._order = Order(self._sources(), data.weights, seed=seed, shuffle=data.shuffle)
        self._cursors = {"prompts": 0, "solutions": 0}
        # (row, epoch, attempt), in the order in which they were put back
        self._returned: deque[tuple[int, int, int]] = deque()
        self._checked_keys = {key for key, _ in responses}

    @functools.cached_property
    def _responses(self) -> Responses:
        """Return the reader of the rows' responses, which supervised steps alone need."""
        from megatron_rl.data.responses import Responses

        return Responses(self._rows, self._tokenizer, self._data, self._texts, self._limits)

    def __len__(self) -> int:
        """Return the prompts per epoch: the number of rows that were neither dropped nor held out."""
        return len(self._kept)

    def next(self, count: int, epochs: int | None = None) -> list[Prompt]:
        """Return the next ``count`` prompts, those that were put back first; a new epoch follows the last.

        A prompt's id is ``"<row>@<epoch>"``.

        epochs: the number after which the data end: near the end fewer than ``count`` are returned,
            after it none.
        """
        if count < 0:
            raise ValueError(f"count={count} prompts cannot be drawn; it must be at least 0")
        again = [self._returned.popleft() for _ in range(min(count, len(self._returned)))]
        rest = count - len(again)
        if epochs is not None:
            rest = min(rest, max(0, epochs * len(self) - self._cursors["prompts"]))
        return [self._prompt(*key) for key in [*again, *self._draw("prompts", rest)]]

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """Put back prompts that were drawn and not trained: they are drawn again before the cursor moves on."""
        self._returned.extend((*_place_of(prompt.prompt_id), prompt.attempt) for prompt in prompts)

    def recall(self, prompt_id: str, attempt: int) -> Prompt:
        """Return a prompt that was drawn before, by its id; the cursor does not move."""
        return self._prompt(*_place_of(prompt_id), attempt)

    def remain(self, epochs: int) -> bool:
        """Tell whether ``next`` has a prompt left of so many epochs."""
        return bool(self._returned) or self._cursors["prompts"] < epochs * len(self)

    def share_drawn(self, epochs: int) -> float:
        """Return the share of so many epochs that was drawn, 0 to 1; prompts that were put back count as not drawn."""
        return (self._cursors["prompts"] - len(self._returned)) / (epochs * len(self))

    def next_solutions(self, count: int) -> list[Solution]:
        """Return the next ``count`` solutions for the supervised warm-up, on a cursor of their own.

        The response is the ``data.solution_key`` column. Under ``data.template=chat`` it is the
        assistant's message, or messages of an episode, as the template writes them: each turn with
        the token by which the template ends it (data/turns.py). Else it is the text and the
        end-of-sequence token, and of an episode's messages, those between two turns are unchanged
        text without loss.

        Turns are tokenized apart from what stands before them, because the model will meet them in
        that way: a prompt's tokens are fixed when it starts to answer.

        Raises ConfigError where a row has no such column, or one that does not end in an
        assistant's message, the tokenizer has no end-of-sequence token, or prompt and solution
        together exceed ``context_tokens``.
        """
        self._check_solutions()
        return self._solutions(self._draw("solutions", count))

    def held_out_solutions(self) -> list[Solution]:
        """Return the solutions of the rows that are held out; raise ConfigError as ``next_solutions`` does."""
        self._check_solutions()
        return self._solutions((int(row), 0) for row in self._held_out)

    def next_pairs(self, count: int, chosen_key: str, rejected_key: str) -> list[tuple[Solution, Solution]]:
        """Return the next ``count`` (chosen, rejected) responses, on the cursor of ``next_solutions``.

        Raises ConfigError as that does, naming ``preference.chosen_key`` or
        ``preference.rejected_key``.
        """
        return self._pairs(self._draw("solutions", count), chosen_key, rejected_key)

    def held_out_pairs(self, chosen_key: str, rejected_key: str) -> list[tuple[Solution, Solution]]:
        """Return the (chosen, rejected) responses of the rows that are held out."""
        return self._pairs(((int(row), 0) for row in self._held_out), chosen_key, rejected_key)

    def _solutions(self, drawn: Iterable[tuple[int, int]]) -> list[Solution]:
        key = self._data.solution_key
        return [
            self._responses.tokenized(self._prompt(row, epoch), row, key, "data.solution_key") for row, epoch in drawn
        ]

    def _pairs(
        self, drawn: Iterable[tuple[int, int]], chosen_key: str, rejected_key: str
    ) -> list[tuple[Solution, Solution]]:
        read, pairs = self._responses.tokenized, []
        for row, epoch in drawn:
            prompt = self._prompt(row, epoch)
            chosen = read(prompt, row, chosen_key, "preference.chosen_key")
            pairs.append((chosen, read(prompt, row, rejected_key, "preference.rejected_key")))
        return pairs

    def state(self) -> dict:
        """Return the cursors as JSON-able values, with the order that they count in and the prompts put back."""
        return {**self._cursors, **self._identity(), "returned": [list(key) for key in self._returned]}

    def load_state(self, state: Mapping[str, object]) -> None:
        """Continue from `state`, or raise ConfigError if seed, shuffle or row count give another order."""
        present, saved = self._identity(), {key: value for key, value in state.items() if key not in _POSITIONS}
        for name in {**present, **saved}:
            before, now = saved.get(name), present.get(name)
            if before != now:
                raise ConfigError(
                    f"the saved data cursor was taken with {name}={before} and this run has {name}={now}, so its "
                    "position means nothing here; restore that value, or start a new run from the exported weights"
                )
        self._cursors = {name: int(state[name]) for name in self._cursors}
        self._returned = deque(tuple(key) for key in state["returned"])

    def _identity(self) -> dict:
        order = {"seed": self._seed, "shuffle": self._data.shuffle, "prompts_per_epoch": len(self)}
        return {**order, **self._order.identity()}

    def _sources(self) -> list[np.ndarray]:
        """Return the kept rows of each source of a mixture; raise ConfigError for one that gives an epoch none."""
        weights = self._data.weights
        if not weights:
            return [self._kept]
        ends = self._rows.source_ends if isinstance(self._rows, Rows) else ()
        if len(ends) != len(weights):
            raise ConfigError(
                f"data.weights has {len(weights)} numbers and the data {len(ends) or 1} sources; give one each"
            )
        sources = np.split(self._kept, np.searchsorted(self._kept, ends[:-1]))
        counts = shares(weights, len(self._kept))
        for number, (source, count) in enumerate(zip(sources, counts, strict=True)):
            if not len(source) or not count:
                fault = (
                    f"its share of an epoch of {len(self._kept)} prompts is less than one; raise data.weights[{number}]"
                    if len(source)
                    else "all its prompts are too long and were dropped; raise the limit, or leave it out"
                )
                raise ConfigError(f"data.train[{number}]={self._data.train[number]!r} would never be drawn: {fault}")
        return sources

    def _draw(self, cursor: str, count: int) -> list[tuple[int, int]]:
        """Return [(row, epoch)] for the next ``count`` positions of a cursor."""
        if count < 0:
            raise ValueError(f"count={count} prompts cannot be drawn; it must be at least 0")
        start = self._cursors[cursor]
        self._cursors[cursor] = start + count
        return [self._order.at(position) for position in range(start, start + count)]

    def _prompt(self, row: int, epoch: int, attempt: int = 0) -> Prompt:
        columns = dict(self._rows[row])
        if has_column(columns, self._data.answer_key):
            columns[ANSWER] = value_of(columns, self._data.answer_key)
        token_ids = tuple(self._token_ids[row].tolist())
        return Prompt(
            prompt_id=f"{row}@{epoch}",
            text=self._texts.text(row),
            token_ids=token_ids,
            columns=columns,
            attempt=attempt,
            messages=self._texts.messages(row),
        )

    def _limit(self) -> tuple[int, str]:
        """Return the most tokens that a prompt may have, and the name of the limit."""
        context = self._limits.context_tokens
        if context is not None and context - 1 < self._data.max_prompt_tokens:
            return context - 1, f"the model's context of {context}, less one for a response"
        return self._data.max_prompt_tokens, "data.max_prompt_tokens"

    def _name(self, row: int) -> str:
        return name_of_row(self._rows, row)

    def _admit(self, row_numbers: range) -> None:
        """Render and tokenize rows; keep those that fit."""
        texts = {row: self._texts.text(row) for row in row_numbers}
        limit, limit_name = self._limit()
        for row, text in [*texts.items()]:
            if self._limits.is_endless(len(text), limit):
                self._refuse_long(row, f"{len(text)} characters", f"{limit} tokens", limit_name)
                del texts[row]
        # No special tokens of the tokenizer's own: the template writes those it wants (a chat
        # template writes them all), a second <bos> would be off-distribution, and a tokenizer that
        # appends <eos> would end the prompt before the answer.
        encoded = self._tokenizer([*texts.values()], add_special_tokens=False).input_ids if texts else []
        for (row, text), token_ids in zip(texts.items(), encoded, strict=True):
            if not token_ids:
                raise ConfigError(
                    f"{self._name(row)}: column {self._data.prompt_key!r} gives a prompt of 0 tokens; "
                    + (
                        f"the tokenizer of {self._tokenizer.name_or_path!r} knows nothing of {text!r:.60}: is its "
                        "folder whole? (model.tokenizer_path)"
                        if text.strip()
                        else "fill or remove it"
                    )
                )
            if len(token_ids) <= limit:
                self._limits.check_vocabulary(self._name(row), "the prompt", token_ids)
                self._token_ids[row] = np.asarray(token_ids, dtype=np.int32)
            else:
                self._refuse_long(row, f"{len(token_ids)} tokens", str(limit), limit_name)

    def _refuse_long(self, row: int, size: str, limit: str, limit_name: str) -> None:
        if self._data.on_long_prompt == "drop":
            self.num_dropped += 1
            return
        raise ConfigError(
            f"{self._name(row)}: the prompt has {size} and at most {limit} are allowed ({limit_name}); raise the "
            "limit, shorten the prompt, or set data.on_long_prompt=drop"
        )

    def _admit_responses(self, key: str, setting: str) -> None:
        """Tokenize every row's response in a column, so that a bad one is named; drop long ones if asked for."""
        from megatron_rl.data.responses import TooLong

        self._responses.require_end()
        for row in [*self._token_ids]:
            try:
                self._responses.tokenized(self._prompt(row, 0), row, key, setting)
            except TooLong:
                if self._data.on_long_prompt != "drop":
                    raise
                self.num_dropped += 1
                del self._token_ids[row]

    def _check_solutions(self) -> None:
        """Check all rows once, on first use, where the constructor was not asked to: RL alone needs no solutions."""
        key = self._data.solution_key
        if key in self._checked_keys:
            return
        self._responses.require_end()
        for row in (*self._kept, *self._held_out):
            self._responses.given(int(row), key, "data.solution_key")
        self._checked_keys.add(key)

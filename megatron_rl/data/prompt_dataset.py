"""The prompts of a data set's rows: tokenized at the start, drawn in one order on every rank, resumable anywhere."""

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

# Fast tokenizers work on a list in parallel; a list of this length takes little memory.
_ROWS_PER_TOKENIZER_CALL = 1024

_POSITIONS = ("prompts", "solutions", "returned")  # the positions in a saved state; its other fields fix the order


def _place_of(prompt_id: str) -> tuple[int, int]:
    """Return (row, epoch) from a prompt's id ``"<row>@<epoch>"``."""
    row, epoch = prompt_id.split("@")
    return int(row), int(epoch)


def _held_out(rows: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Return the sorted numbers of the rows that are held out for evaluation, drawn from ``seed``.

    rows: the numbers of all rows that were not dropped.
    share: the fraction of these rows to hold out; above 0, at least one row is held out.
    """
    if not share:
        return rows[:0]
    count = max(1, round(share * len(rows)))
    if count >= len(rows):
        raise ConfigError(
            f"sft.eval_share={share:g} holds out {count} of {len(rows)} rows, which leaves none to train; lower "
            "sft.eval_share"
        )
    key = np.array([seed % 2**64, 2**64 - 1], dtype=np.uint64)  # a stream that no epoch's order uses
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

    The order (data/order.py) is a permutation of the rows per epoch, drawn from (seed, epoch)
    alone. Under ``data.weights`` it is a mixture of the sources.

    rows: the dataset, see `load_rows`; row numbers in ids and messages count from 0 in this list.
    tokenizer: a Hugging Face tokenizer.
    context_tokens: the model's context in tokens; a prompt must leave room for one more token.
        None: no limit.
    vocab_size: the number of tokens that the model knows; None: no limit.
    required: the columns that every row must have, other than the prompt.
    held_out_share: the fraction of the rows, drawn by the seed, that is kept for
        ``held_out_solutions`` and never drawn.
    responses: (column, setting) of each response that supervised steps read; the responses of all
        rows are checked at the start.
    followed_by: the role of observations that will follow the prompts; the chat template is checked
        for it. None: no observations.

    Every row is tokenized at the start, so that a bad row ends the run before its first step.
    Raises ConfigError for:

    - a row without ``data.prompt_key`` or another required column (data/columns.py);
    - a prompt that is neither text nor, under ``data.template=chat``, a list of messages ``{"role":
      ..., "content": ...}``;
    - an empty prompt, or a token that the model does not know;
    - under ``data.on_long_prompt=fail``, a prompt over the limit, or a response that does not fit
      in the context after its prompt;
    - under ``data.on_long_prompt=drop``, a dataset with no row left (``num_dropped`` counts the
      dropped rows).

    The attribute ``data`` is the given section with ``data.template=auto`` replaced by the
    template. ``Prompt.columns`` is the row. If ``data.answer_key`` is not "answer", the value in
    that column is also given as "answer", which the built-in reward functions read.
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
        # The settings, and the columns of all rows.
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
        # Prompts and responses, tokenized and checked. int32 arrays, not tuples: a million prompts stay well
        # under a gigabyte.
        self._texts = _prompt_texts(rows, tokenizer, data)
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
        # The order of the rows that are left and not held out, and the cursors.
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
        """Return the reader of the rows' responses, made on first use; only supervised steps need it."""
        from megatron_rl.data.responses import Responses

        return Responses(self._rows, self._tokenizer, self._data, self._texts, self._limits)

    def __len__(self) -> int:
        """Return the number of prompts per epoch, one for each row that is neither dropped nor held out."""
        return len(self._kept)

    def next(self, count: int, epochs: int | None = None) -> list[Prompt]:
        """Return the next ``count`` prompts, first those that were put back. Epochs follow one another.

        A prompt's id is ``"<row>@<epoch>"``.

        epochs: the number of epochs after which the data end, so that fewer prompts or none are
            returned; None: no end.
        """
        if count < 0:
            raise ValueError(f"count={count} prompts cannot be drawn; it must be at least 0")
        again = [self._returned.popleft() for _ in range(min(count, len(self._returned)))]
        rest = count - len(again)
        if epochs is not None:
            rest = min(rest, max(0, epochs * len(self) - self._cursors["prompts"]))
        return [self._prompt(*key) for key in [*again, *self._draw("prompts", rest)]]

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """Put back prompts that were drawn and not trained; ``next`` returns these first."""
        self._returned.extend((*_place_of(prompt.prompt_id), prompt.attempt) for prompt in prompts)

    def recall(self, prompt_id: str, attempt: int) -> Prompt:
        """Return a prompt that was drawn before, by its id and attempt number. The next draws do not change."""
        return self._prompt(*_place_of(prompt_id), attempt)

    def remain(self, epochs: int) -> bool:
        """Return whether ``next`` has a prompt left within ``epochs`` epochs."""
        return bool(self._returned) or self._cursors["prompts"] < epochs * len(self)

    def share_drawn(self, epochs: int) -> float:
        """Return the fraction, 0 to 1, of ``epochs`` epochs that was drawn; prompts put back count as not drawn."""
        return (self._cursors["prompts"] - len(self._returned)) / (epochs * len(self))

    def next_solutions(self, count: int) -> list[Solution]:
        """Return the next ``count`` solutions for supervised steps.

        They have their own position in the order of the rows, which drawing prompts (``next``) does
        not move.

        A solution is the response in the ``data.solution_key`` column. Under ``data.template=chat``
        the template writes it, as the assistant's message or as the messages of an episode. Each
        turn then ends with the token that the template writes (data/turns.py).

        Under any other ``data.template`` a turn is its text and the end-of-sequence token. Messages
        between two turns are unchanged text without loss.

        A turn is tokenized apart from the text before it, as in sampling: there a prompt's tokens
        are fixed before the model answers.

        Raises ConfigError for a row without a solution, or with one whose last message is not the
        assistant's. It is also raised for a tokenizer without an end-of-sequence token, and for
        prompt and solution beyond ``context_tokens``.
        """
        self._check_solutions()
        return self._solutions(self._draw("solutions", count))

    def held_out_solutions(self) -> list[Solution]:
        """Return the solutions of the held-out rows. Raises ConfigError as ``next_solutions`` does."""
        self._check_solutions()
        return self._solutions((int(row), 0) for row in self._held_out)

    def next_pairs(self, count: int, chosen_key: str, rejected_key: str) -> list[tuple[Solution, Solution]]:
        """Return the next ``count`` (chosen, rejected) pairs of responses, drawn as ``next_solutions`` draws.

        Raises ConfigError as ``next_solutions`` does, naming ``preference.chosen_key`` or
        ``preference.rejected_key``.

        chosen_key, rejected_key: the columns of the two responses.
        """
        return self._pairs(self._draw("solutions", count), chosen_key, rejected_key)

    def held_out_pairs(self, chosen_key: str, rejected_key: str) -> list[tuple[Solution, Solution]]:
        """Return the (chosen, rejected) pairs of responses of the held-out rows."""
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
        """Return, as JSON-able values, the cursors, the prompts put back, and what fixes the order, such as the seed.

        A cursor is a position in the order of the rows.
        """
        return {**self._cursors, **self._identity(), "returned": [list(key) for key in self._returned]}

    def load_state(self, state: Mapping[str, object]) -> None:
        """Continue at the positions of ``state``, a value that the method ``state`` returned.

        Raises ConfigError if seed, shuffle, row count or mixture differ from the saved ones.
        """
        present, saved = self._identity(), {key: value for key, value in state.items() if key not in _POSITIONS}
        for name in {**present, **saved}:
            before, now = saved.get(name), present.get(name)
            if before != now:
                raise ConfigError(
                    f"the saved data cursor was taken with {name}={before} and this run has {name}={now}, so its "
                    "position is not valid here; restore that value, or start a new run from the exported weights"
                )
        self._cursors = {name: int(state[name]) for name in self._cursors}
        self._returned = deque(tuple(key) for key in state["returned"])

    def _identity(self) -> dict:
        order = {"seed": self._seed, "shuffle": self._data.shuffle, "prompts_per_epoch": len(self)}
        return {**order, **self._order.identity()}

    def _sources(self) -> list[np.ndarray]:
        """Return an array of row numbers for each source of the mixture, without dropped and held-out rows.

        Without ``data.weights`` all rows are one source. Raises ConfigError for a source that would
        never be drawn.
        """
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
        """Return (row, epoch) for each of the next ``count`` positions in the order, and move a cursor past them.

        cursor: the cursor's name: "prompts" or "solutions".
        """
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
        """Return (the largest number of tokens of a prompt, the name of this limit for errors)."""
        context = self._limits.context_tokens
        if context is not None and context - 1 < self._data.max_prompt_tokens:
            return context - 1, f"the model's context of {context}, less one for a response"
        return self._data.max_prompt_tokens, "data.max_prompt_tokens"

    def _name(self, row: int) -> str:
        return name_of_row(self._rows, row)

    def _admit(self, row_numbers: range) -> None:
        """Render and tokenize the prompts of rows, and keep the tokens of those that fit the limit.

        A longer prompt is dropped, or raises ConfigError under ``data.on_long_prompt=fail``.
        """
        texts = {row: self._texts.text(row) for row in row_numbers}
        limit, limit_name = self._limit()
        for row, text in [*texts.items()]:
            if self._limits.is_endless(len(text), limit):
                self._refuse_long(row, f"{len(text)} characters", f"{limit} tokens", limit_name)
                del texts[row]
        # The tokenizer adds no special tokens, since the template writes all that it needs. A second <bos>
        # would be off-distribution, and an <eos> would end the prompt before the answer.
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
        """Tokenize every row's response in column ``key``, so that a bad response raises ConfigError at the start.

        Under ``data.on_long_prompt=drop`` rows whose response does not fit in the context are
        dropped.

        setting: the configuration's key that names the column, for errors.
        """
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
        """Raise ConfigError for a row without a valid solution; do nothing if the solutions were checked before."""
        key = self._data.solution_key
        if key in self._checked_keys:
            return
        self._responses.require_end()
        for row in (*self._kept, *self._held_out):
            self._responses.given(int(row), key, "data.solution_key")
        self._checked_keys.add(key)

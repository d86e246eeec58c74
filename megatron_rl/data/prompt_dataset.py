"""Dataset to prompts: a JSONL file, a shuffled order per epoch that is the same on every rank, a resumable cursor."""

from __future__ import annotations

import json
import pathlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.config import DataConfig
from megatron_rl.data.chat import Message, Observations, check_messages, render_chat
from megatron_rl.errors import ConfigError
from megatron_rl.types import Prompt

# The fast tokenizers are parallel over a list, and a list of this length stays small in memory.
_ROWS_PER_TOKENIZER_CALL = 1024


def load_rows(path: str | pathlib.Path, key: str = "data.train") -> list[dict]:
    """Read a JSONL dataset: one JSON object per line, UTF-8; lines of white space alone are not rows.

    key: the setting that the path came from, for the messages.

    Raises ConfigError where the file is missing or empty, or a line is not a JSON object (with ``file:line``).
    """
    if not str(path):
        raise ConfigError(f"{key} is empty; set it to the path of a JSONL file, one JSON object per line")
    file = pathlib.Path(path)
    if not file.is_file():
        fault = "is a directory, not a file" if file.is_dir() else "does not exist"
        raise ConfigError(f"{key}={str(path)!r} {fault}; set it to the path of a JSONL file, one JSON object per line")
    rows = []
    # Cut at b"\n" only: str.splitlines would also cut at U+2028, which JSON allows inside a string.
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                rows.append(_parse_line(line, f"{path}:{number}"))
    if not rows:
        raise ConfigError(f"{key}={str(path)!r} has no rows; it needs at least one JSON object on a line of its own")
    return rows


def _place_of(prompt_id: str) -> tuple[int, int]:
    """Return (row, epoch) of ``"<row>@<epoch>"``."""
    row, epoch = prompt_id.split("@")
    return int(row), int(epoch)


def _parse_line(line: bytes, where: str) -> dict:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where}: not valid JSON: {error.msg} (column {error.colno}); every line is one JSON object"
        ) from None
    if not isinstance(row, dict):
        raise ConfigError(f'{where}: a JSON {type(row).__name__}, not an object; every line is one {{"prompt": ...}}')
    return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Holds a response that a supervised warm-up imitates.

    response_ids: [T] behind the prompt, every turn ended by the end-of-sequence token.
    loss_mask:    [T] True on the assistant's turns; None: the whole response is one turn.
    """

    prompt: Prompt
    response_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...] | None = None


class PromptDataset:
    """Draws the prompts of a dataset in a reproducible order, epoch after epoch.

    The order of an epoch is a permutation drawn from a Philox generator keyed by (seed, epoch) alone (file order where
    ``data.shuffle`` is false): every rank, every layout and every resumed run draws the same prompts.

    rows:           the dataset, see `load_rows`; row numbers in ids and messages count from 0 in this list.
    tokenizer:      a Hugging Face tokenizer.
    context_tokens: the model's context in tokens, None for no limit; a prompt must leave room in it for one more token.

    Every row is tokenized here, so that a bad row ends the run before its first step and not in the middle of it.
    Raises ConfigError for a row without ``data.prompt_key`` (or a renamed ``data.answer_key``), a prompt that is
    neither text nor, under ``data.template=chat``, a list of messages ``{"role": ..., "content": ...}``, an empty
    prompt, a prompt over the limit (``data.on_long_prompt=fail``), or when no row is left (``drop``; see
    ``num_dropped``).

    ``Prompt.columns`` is the row. Where ``data.answer_key`` is not "answer", the column it names is also given as
    "answer", the name that the built-in reward functions read.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, object]],
        tokenizer,
        data: DataConfig,
        seed: int,
        context_tokens: int | None = None,
    ) -> None:
        if data.template == "chat" and tokenizer.chat_template is None:
            raise ConfigError(
                "data.template='chat' and the tokenizer has no chat template; use a text with {prompt} in it"
            )
        self.num_dropped = 0
        self._rows = rows
        self._tokenizer = tokenizer
        self._data = data
        self._seed = seed
        self._context_tokens = context_tokens
        # int32 arrays, not tuples: a dataset of a million prompts stays well under a gigabyte.
        self._token_ids: dict[int, np.ndarray] = {}
        for start in range(0, len(rows), _ROWS_PER_TOKENIZER_CALL):
            self._admit(range(start, min(start + _ROWS_PER_TOKENIZER_CALL, len(rows))))
        if not self._token_ids:
            raise ConfigError(
                f"no prompt is left: all {len(rows)} rows are longer than {self._limit()[0]} tokens "
                f"({self._limit()[1]}) and data.on_long_prompt='drop'; raise the limit or shorten the prompts"
            )
        self._kept = np.fromiter(self._token_ids, dtype=np.int64)
        self._cursors = {"prompts": 0, "solutions": 0}
        # (row, epoch, attempt), in the order in which they were put back
        self._returned: deque[tuple[int, int, int]] = deque()
        self._order_of: tuple[int, np.ndarray] | None = None
        self._solutions_checked = False

    def __len__(self) -> int:
        """Return the prompts per epoch: the rows that were not dropped."""
        return len(self._kept)

    def next(self, count: int, epochs: int | None = None) -> list[Prompt]:
        """Return the next ``count`` prompts, those that were put back first; a new epoch follows the last.

        A prompt's id is ``"<row>@<epoch>"``.

        epochs: the number after which the data end: near the end fewer than ``count`` are returned, after it none.
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

        The response is the tokenized ``data.solution_key`` column and the end-of-sequence token. It is tokenized apart
        from the prompt, because the model will meet it in that way: the prompt's tokens are fixed when it starts to
        answer. A column of messages is an episode: the assistant's messages are turns, and the messages between two
        turns are an observation, without loss (written by the template under ``data.template=chat``, else as unchanged
        text).

        Raises ConfigError where a row has no such column, or one that does not end in an assistant's message, the
        tokenizer has no end-of-sequence token, or prompt and solution together exceed ``context_tokens``.
        """
        self._check_solutions()
        solutions = []
        for row, epoch in self._draw("solutions", count):
            prompt = self._prompt(row, epoch)
            solution = self._solution(prompt, self._rows[row][self._data.solution_key])
            total = len(prompt.token_ids) + len(solution.response_ids)
            if self._context_tokens is not None and total > self._context_tokens:
                raise ConfigError(
                    f"row {row}: prompt and {self._data.solution_key} have {total} tokens (end-of-sequence included) "
                    f"and the model's context {self._context_tokens}; remove the row, or take a model with a longer "
                    "context"
                )
            solutions.append(solution)
        return solutions

    def _solution(self, prompt: Prompt, given: str | Sequence[Message]) -> Solution:
        if isinstance(given, str):
            return Solution(prompt=prompt, response_ids=self._turn(given))
        observations = Observations(self._tokenizer, self._data.template)
        token_ids: list[int] = []
        mask: list[bool] = []
        waiting: list[Message] = []
        for message in given:
            if message["role"] != "assistant":
                waiting.append(message)
                continue
            if waiting:
                text = "".join(other["content"] for other in waiting)
                between = observations.token_ids(
                    waiting if self._data.template == "chat" else text, self._tokenizer.eos_token_id
                )
                token_ids, mask, waiting = [*token_ids, *between], [*mask, *[False] * len(between)], []
            turn = self._turn(message["content"])
            token_ids, mask = [*token_ids, *turn], [*mask, *[True] * len(turn)]
        return Solution(prompt=prompt, response_ids=tuple(token_ids), loss_mask=tuple(mask))

    def _turn(self, text: str) -> tuple[int, ...]:
        return (*self._tokenizer(text, add_special_tokens=False).input_ids, self._tokenizer.eos_token_id)

    def state(self) -> dict:
        """Return the cursors as JSON-able values, with the order that they count in and the prompts put back."""
        return {**self._cursors, **self._identity(), "returned": [list(key) for key in self._returned]}

    def load_state(self, state: Mapping[str, object]) -> None:
        """Continue from `state`, or raise ConfigError if seed, shuffle or row count give another order."""
        for name, value in self._identity().items():
            if state[name] != value:
                raise ConfigError(
                    f"the saved data cursor was taken with {name}={state[name]} and this run has {name}={value}, so "
                    "its position means nothing here; restore that value, or start a new run from the exported weights"
                )
        self._cursors = {name: int(state[name]) for name in self._cursors}
        self._returned = deque(tuple(key) for key in state["returned"])

    def _identity(self) -> dict:
        return {"seed": self._seed, "shuffle": self._data.shuffle, "prompts_per_epoch": len(self)}

    def _draw(self, cursor: str, count: int) -> list[tuple[int, int]]:
        """Return [(row, epoch)] for the next ``count`` positions of a cursor."""
        if count < 0:
            raise ValueError(f"count={count} prompts cannot be drawn; it must be at least 0")
        start = self._cursors[cursor]
        self._cursors[cursor] = start + count
        drawn = []
        for position in range(start, start + count):
            epoch, offset = divmod(position, len(self))
            drawn.append((int(self._order(epoch)[offset]), epoch))
        return drawn

    def _order(self, epoch: int) -> np.ndarray:
        """Return [prompts per epoch] int64: the rows of one epoch in the order they are drawn."""
        if not self._data.shuffle:
            return self._kept
        if self._order_of is None or self._order_of[0] != epoch:
            # A key, not a SeedSequence: it takes any integer seed, and no two (seed, epoch) share a stream.
            key = np.array([self._seed % 2**64, epoch], dtype=np.uint64)
            self._order_of = (epoch, np.random.Generator(np.random.Philox(key=key)).permutation(self._kept))
        return self._order_of[1]

    def _prompt(self, row: int, epoch: int, attempt: int = 0) -> Prompt:
        columns = dict(self._rows[row])
        if self._data.answer_key in columns:
            columns["answer"] = columns[self._data.answer_key]
        token_ids = tuple(self._token_ids[row].tolist())
        return Prompt(
            prompt_id=f"{row}@{epoch}", text=self._render(row), token_ids=token_ids, columns=columns, attempt=attempt
        )

    def _column(self, row: int, key: str, setting: str, *, messages: bool) -> str | list[Message]:
        """Return a column that holds text or, where ``messages`` allows it, messages; raise ConfigError otherwise."""
        columns = self._rows[row]
        if key not in columns:
            known = ", ".join(map(repr, columns)) or "none"
            raise ConfigError(f"row {row} has no column {key!r} ({setting}); its columns are {known}")
        value = columns[key]
        if messages and isinstance(value, list):
            return check_messages(value, f"row {row}: column {key!r} ({setting})")
        if not isinstance(value, str):
            kind = type(value).__name__
            wanted = "text; a list of messages needs data.template=chat" if isinstance(value, list) else "text"
            raise ConfigError(f"row {row}: column {key!r} ({setting}) is a {kind}, {value!r:.80}; it must be {wanted}")
        return value

    def _render(self, row: int) -> str:
        chat = self._data.template == "chat"
        content = self._column(row, self._data.prompt_key, "data.prompt_key", messages=chat)
        if chat:
            messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
            if messages[-1]["role"] == "assistant":
                raise ConfigError(
                    f"row {row}: column {self._data.prompt_key!r} (data.prompt_key) ends in an assistant's message, "
                    "and the response is what the assistant says; end it before that"
                )
            where = f"row {row}: column {self._data.prompt_key!r} (data.prompt_key)"
            return render_chat(self._tokenizer, messages, where, add_generation_prompt=True)
        # Not str.format: a dataset's prompts, and templates with LaTeX or JSON in them, are full of braces.
        return self._data.template.replace("{prompt}", content)

    def _limit(self) -> tuple[int, str]:
        """Return the most tokens that a prompt may have, and the name of the limit."""
        if self._context_tokens is not None and self._context_tokens - 1 < self._data.max_prompt_tokens:
            return self._context_tokens - 1, f"the model's context of {self._context_tokens}, less one for a response"
        return self._data.max_prompt_tokens, "data.max_prompt_tokens"

    def _admit(self, row_numbers: range) -> None:
        """Render and tokenize rows; keep those that fit."""
        renamed = self._data.answer_key != "answer"
        for row in row_numbers:
            if renamed and self._data.answer_key not in self._rows[row]:
                known = ", ".join(map(repr, self._rows[row])) or "none"
                raise ConfigError(
                    f"row {row} has no column {self._data.answer_key!r} (data.answer_key); its columns are {known}"
                )
        # No special tokens of the tokenizer's own: the template writes those it wants (a chat template writes them
        # all), a second <bos> would be off-distribution, and a tokenizer that appends <eos> would end the prompt
        # before the answer.
        encoded = self._tokenizer([self._render(row) for row in row_numbers], add_special_tokens=False).input_ids
        limit, limit_name = self._limit()
        for row, token_ids in zip(row_numbers, encoded, strict=True):
            if not token_ids:
                raise ConfigError(
                    f"row {row}: column {self._data.prompt_key!r} gives a prompt of 0 tokens; fill or remove it"
                )
            if len(token_ids) <= limit:
                self._token_ids[row] = np.asarray(token_ids, dtype=np.int32)
            elif self._data.on_long_prompt == "drop":
                self.num_dropped += 1
            else:
                raise ConfigError(
                    f"row {row}: the prompt has {len(token_ids)} tokens and at most {limit} are allowed "
                    f"({limit_name}); raise the limit, shorten the prompt, or set data.on_long_prompt=drop"
                )

    def _check_solutions(self) -> None:
        """Check all rows once, on first use: a run without warm-up needs no solutions."""
        if self._solutions_checked:
            return
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(
                "the tokenizer has no eos_token and a solution must end in one; set it in tokenizer_config.json"
            )
        for row in self._kept:
            key = self._data.solution_key
            value = self._column(int(row), key, "data.solution_key", messages=True)
            if isinstance(value, list) and (value[0]["role"] != "assistant" or value[-1]["role"] != "assistant"):
                raise ConfigError(
                    f"row {row}: column {key!r} (data.solution_key) has messages of the roles "
                    f"{', '.join(m['role'] for m in value)}; it begins and ends with the assistant's"
                )
        self._solutions_checked = True

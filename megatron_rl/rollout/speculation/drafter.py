"""The drafter of a batch: for each row (sample) the tokens that may come next, by earlier answers to its prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from megatron_rl.rollout.speculation.history import History, key_of
from megatron_rl.rollout.speculation.suffixes import Cursor, SuffixIndex

MOST = 8  # tokens of a draft


class Drafter(Protocol):
    """Drafts tokens for the rows of one batch after another. A draft may be anything; it changes no sampled token."""

    def begin(self, prompts: Sequence[Sequence[int]], prompt_of_row: Sequence[int]) -> bool:
        """Begin a batch; return whether any of its prompts has earlier answers.

        prompts: their token ids.
        prompt_of_row: each row's index in them.
        """
        ...

    def draft(self, row: int, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return at most ``most`` tokens that may follow a row's tokens so far."""
        ...

    def verified(self, row: int, drafted: int, accepted: int) -> None:
        """Take into account how many of a row's latest drafted tokens were accepted."""
        ...

    def ended(self, row: int, tokens: Sequence[int]) -> None:
        """Take a finished row's tokens into account."""
        ...


class HistoryDrafter:
    """Drafts from the history's answers to a row's prompt, and from the finished rows of the same prompt.

    A row's drafts get shorter where its tokens leave the earlier answers: after a pass the next draft has
    at most one token more than were accepted, or twice as many if all were.

    version: a callable that returns the version of the weights that sample, for ``History.add``.
    """

    def __init__(self, history: History, version: Callable[[], int]) -> None:
        self._history, self._version = history, version
        self._keys: list[str] = []
        self._prompt_of_row: Sequence[int] = ()
        self._indices: dict[int, SuffixIndex] = {}  # prompt → its index, made for its first draft
        self._cursors: dict[int, Cursor] = {}
        self._most: dict[int, int] = {}  # row → most tokens of its next draft

    def begin(self, prompts: Sequence[Sequence[int]], prompt_of_row: Sequence[int]) -> bool:
        self._keys, self._prompt_of_row = [key_of(prompt) for prompt in prompts], prompt_of_row
        self._indices, self._cursors, self._most = {}, {}, {}
        return any(key in self._history for key in self._keys)

    def draft(self, row: int, tokens: Sequence[int], most: int) -> list[int]:
        if row not in self._cursors:
            self._cursors[row] = Cursor(self._index(self._prompt_of_row[row]))
        return self._cursors[row].draft(tokens, min(most, self._most.get(row, MOST)))

    def _index(self, prompt: int) -> SuffixIndex:
        if prompt not in self._indices:
            self._indices[prompt] = self._history.index(self._keys[prompt])
        return self._indices[prompt]

    def verified(self, row: int, drafted: int, accepted: int) -> None:
        if drafted:
            self._most[row] = min(MOST, 2 * drafted if accepted == drafted else accepted + 1)

    def ended(self, row: int, tokens: Sequence[int]) -> None:
        prompt = self._prompt_of_row[row]
        if prompt in self._indices:  # an index that is made later has the history's answers, this one among them
            self._indices[prompt].add(tokens)
        self._history.add(self._keys[prompt], [tokens], visit=self._version())

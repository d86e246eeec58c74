"""Drafters of every quality, and a pace that drafts a fixed number of tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_rl.rollout.engines.embedded import TransformersEngine
from megatron_rl.rollout.speculation.decode import SpeculativeDecoder
from megatron_rl.rollout.speculation.drafter import HistoryDrafter
from megatron_rl.rollout.speculation.history import History
from megatron_rl.types import Rollout


@dataclass
class FixedPace:
    """Asks for the same number of tokens in every pass; it keeps (asked, drafts) of each."""

    asked: int
    passes: list[tuple[int, list[tuple[int, int]]]] = field(default_factory=list)

    def width(self, num_rows: int) -> int:
        return self.asked

    def note(self, asked: int, seconds: float, drafts: Sequence[tuple[int, int]]) -> None:
        assert seconds > 0
        self.passes.append((asked, list(drafts)))


class InTurn:
    """Lets one batch after another draft or not, by a list; the last is for all that follow."""

    def __init__(self, *ways: bool) -> None:
        self.ways, self.noted = list(ways), []

    def is_on(self, num_rows: int, *, known: bool) -> bool:
        return self.ways.pop(0) if len(self.ways) > 1 else self.ways[0]

    def note(self, num_rows: int, *, known: bool, drafted: bool, seconds: float, tokens: int) -> None:
        assert seconds > 0 and tokens > 0
        self.noted.append((num_rows, known, drafted))


class KnownDrafter:
    """Drafts from the rollouts that come, of which ``share`` of the tokens is replaced by drawn ones."""

    def __init__(self, rollouts: Sequence[Rollout], share: float, vocab_size: int) -> None:
        self._answers: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for rollout in rollouts:
            self._answers.setdefault(rollout.prompt.token_ids, []).append(rollout.response_ids)
        self._share, self._vocab_size, self._drawn = share, vocab_size, random.Random(0)
        self._coming: list[tuple[int, ...]] = []
        self.ends: list[list[int]] = []

    def begin(self, prompts: Sequence[Sequence[int]], prompt_of_row: Sequence[int]) -> bool:
        coming = [iter(self._answers[tuple(prompt)]) for prompt in prompts]
        self._coming = [next(coming[prompt]) for prompt in prompt_of_row]
        return True

    def draft(self, row: int, tokens: Sequence[int], most: int) -> list[int]:
        coming = self._coming[row]
        assert tuple(tokens) == coming[: len(tokens)]
        # beyond the row's end too, where a drafter cannot know that it is one
        draft = [*coming[len(tokens) :], *[self._drawn.randrange(self._vocab_size) for _ in range(most)]][:most]
        drawn = self._drawn
        return [drawn.randrange(self._vocab_size) if drawn.random() < self._share else token for token in draft]

    def verified(self, row: int, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted

    def ended(self, row: int, tokens: Sequence[int]) -> None:
        assert tuple(tokens) == self._coming[row]
        self.ends.append(list(tokens))


def speculating(
    engine: TransformersEngine, drafter: object = None, asked: int = 4, switch: InTurn | None = None
) -> SpeculativeDecoder:
    """Let an engine decode with a drafter, that of an empty history unless one is given; return the decoder.

    switch: which batches draft; None: all.
    """
    drafter = drafter or HistoryDrafter(History(), lambda: engine.weight_version)
    switch = switch or InTurn(True)
    engine._decode_rows = decoder = SpeculativeDecoder(engine._model, drafter, FixedPace(asked), switch)
    return decoder

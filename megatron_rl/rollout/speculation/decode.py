"""Speculative decoding by a Hugging Face model: one forward pass checks several drafted tokens of each sample (row).

Each position of a row has its own random number (decoding.py), and the token there is a function of the
model's distribution and this number. A pass over a draft gives the distributions after each of its
tokens, so also the token that decoding without drafts would draw there. A drafted token is accepted if it is
this token. So the samples are those of decoding without drafts, up to the float rounding of passes of
other shapes. A draft is accepted with its probability under the model, which no other exact method exceeds for
a drafter that proposes a single token (Leviathan et al. 2023, arXiv:2211.17192).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from megatron_rl.rollout.engines.decoding import Decode, Decoded, Draws, Row, decode_rows
from megatron_rl.rollout.engines.prefix_rows import COMPACT_FRACTION, run_prompts
from megatron_rl.rollout.speculation.counts import Counts
from megatron_rl.rollout.speculation.drafter import Drafter
from megatron_rl.rollout.speculation.pace import Pace, Switch
from megatron_rl.rollout.speculation.row_cache import Masks, RowCache

MAX_LOGITS = 2**27  # of a pass, over all rows, positions and tokens of the vocabulary: 512 MB in float32


class SpeculativeDecoder:
    """Decodes batches of rows (samples) with the drafts of a drafter, where that pays.

    It is called as ``decode_rows`` (decoding.py), without router records.

    Raises ConfigError for a model whose states cannot go back by some tokens.
    """

    def __init__(self, model: PreTrainedModel, drafter: Drafter, pace: Pace, switch: Switch) -> None:
        self._masks, self._drafter, self._pace, self._switch = Masks(model), drafter, pace, switch
        self.counts = Counts()

    @torch.inference_mode()
    def __call__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[tuple[int, ...]],
        rows: Sequence[Row],
        decode: Decode,
        routers: None = None,
    ) -> Decoded:
        """Generate a batch of rows (samples) to their ends, and return their tokens. Finished rows leave the batch."""
        started, known = time.perf_counter(), self._drafter.begin(prompts, [row.prompt for row in rows])
        drafts = self._switch.is_on(len(rows), known=known)
        if drafts:
            decoded = self._with_drafts(_Batch(model, prompts, rows, decode, self._masks), len(rows))
        else:
            decoded = self._plainly(model, prompts, rows, decode)
        seconds, tokens = time.perf_counter() - started, int(decoded.lengths.sum())
        self._switch.note(len(rows), known=known, drafted=drafts, seconds=seconds, tokens=tokens)
        return decoded

    def _plainly(
        self, model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], rows: Sequence[Row], decode: Decode
    ) -> Decoded:
        """Decode a batch without drafts. Its samples are kept for the drafts of later ones."""
        decoded = decode_rows(model, prompts, rows, decode)
        for row, length in enumerate(decoded.lengths.tolist()):
            self._drafter.ended(row, decoded.token_ids[:length, row].tolist())
            self.counts.passes += length - 1
        return decoded

    def _with_drafts(self, batch: _Batch, num_rows: int) -> Decoded:
        running = range(num_rows)
        while True:
            for row in sorted(set(running).difference(batch.running)):
                self._drafter.ended(row, batch.tokens[row])
            if not (running := batch.running):
                return batch.decoded()
            # Rows of equal tokens are one row of the cache: the first of them has a draft, which is checked for all.
            leaders, started = batch.leaders, time.perf_counter()
            asked = min(self._pace.width(len(leaders)), max(0, MAX_LOGITS // (len(leaders) * batch.vocab_size) - 1))
            found = batch.step({row: self._draft(batch, row, asked) for row in leaders})
            self._pace.note(asked, time.perf_counter() - started, [found[row] for row in leaders])
            self.counts.note([*found.values()])
            for row, (drafted, accepted) in found.items():
                self._drafter.verified(row, drafted, accepted)

    def _draft(self, batch: _Batch, row: int, asked: int) -> Sequence[int]:
        most = min(asked, batch.room(row))
        return self._drafter.draft(row, batch.tokens[row], most) if most > 0 else ()


@dataclass(frozen=True, slots=True)
class _Cached:
    """Names the rows (samples) of equal tokens that share a row of the cache.

    first: the first of them, or the last one that ended.
    members: those that still run; () if the row of the cache waits to be dropped.
    """

    first: int
    members: tuple[int, ...]


class _Batch:
    """Holds a batch of rows (samples): their tokens so far, and the cache of those that still run.

    Rows of a prompt share a row of the cache while their tokens are equal (engines/prefix_rows.py).

    tokens: each row's tokens.
    running: the numbers of the rows that have not ended.
    leaders: of each row of the cache in use, the first of its rows (samples).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[tuple[int, ...]],
        rows: Sequence[Row],
        decode: Decode,
        masks: Masks,
    ) -> None:
        """Run the model on the prompts, and draw each row's first token."""
        self._model, self._rows, self._decode, self._masks = model, rows, decode, masks
        self._device = next(model.parameters()).device
        # Sliding layers need all columns too, since a row's tokens move when its pads are left out.
        cache, logits, positions, mask, _ = run_prompts(model, prompts, DynamicCache())
        prompt_of_row = torch.tensor([row.prompt for row in rows], device=self._device)
        self._cache = RowCache(cache, mask.shape[1] - mask.sum(dim=1), torch.arange(len(prompts), device=self._device))
        self._prompt_tokens = positions[prompt_of_row, 0].tolist()
        self.vocab_size = logits.shape[-1]
        self._draws = Draws(rows, max(row.max_tokens for row in rows), self._device)
        self.tokens: list[list[int]] = [[] for _ in rows]
        self._text_ends: dict[int, int] = {}  # row → its length, for rows that a stop text ended
        self._early_ends: dict[int, int] = {}  # row → its length, for rows that ``Row.ends_early`` ended
        self._cached: list[_Cached] = []  # in the cache's order
        self._has_ended = [False] * len(rows)
        everyone = torch.arange(len(rows), device=self._device)
        first = self._draws.take(logits, 0, everyone, prompt_of_row).tolist()
        parts: list[dict[tuple[int, ...], list[int]]] = [{} for _ in prompts]
        for row, token in enumerate(first):
            self._append(row, [token])
            parts[rows[row].prompt].setdefault((token,), []).append(row)
        self._part(parts)

    @property
    def running(self) -> list[int]:
        return sorted(row for cached in self._cached for row in cached.members)

    @property
    def leaders(self) -> list[int]:
        return [cached.first for cached in self._cached if cached.members]

    def room(self, row: int) -> int:
        """Return how many tokens may be drafted for a row, so that one more is within its maximum."""
        return self._rows[row].max_tokens - len(self.tokens[row]) - 1

    def step(self, drafts: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, int]]:
        """Run the model on each leader's last token and its draft, and append the tokens that its rows draw.

        drafts: leader → its draft.

        Returns running row → the tokens drafted and accepted.
        """
        given = [drafts[cached.first] if cached.members else () for cached in self._cached]
        logits = self._forward(given)
        # Draw each row's tokens after each position of its draft; the padding of shorter drafts is left out.
        starts = np.cumsum([0, *(len(draft) + 1 for draft in given)]).tolist()
        in_cache = [place for place, draft in enumerate(given) for _ in range(len(draft) + 1)]
        at = [position for draft in given for position in range(len(draft) + 1)]
        places = [
            (starts[place] + position, len(self.tokens[row]) + position, row)
            for place, cached in enumerate(self._cached)
            for row in cached.members
            for position in range(len(given[place]) + 1)
        ]
        entries, steps, rows = torch.tensor(places, device=self._device).unbind(1)
        drawn = iter(self._draws.take(logits[in_cache, at], steps, rows, entries).tolist())
        # Accept each draft up to its first token that is not the drawn one.
        found: dict[int, tuple[int, int]] = {}
        parts: list[dict[tuple[int, ...], list[int]]] = []
        for cached, draft in zip(self._cached, given, strict=True):
            parts.append({})
            for row in cached.members:
                own = [next(drawn) for _ in range(len(draft) + 1)]
                accepted = next((i for i, token in enumerate(draft) if token != own[i]), len(draft))
                found[row] = len(draft), min(accepted, self._append(row, own[: accepted + 1]))
                parts[-1].setdefault(tuple(own[: accepted + 1]), []).append(row)
        self._part(parts)
        return found

    def _part(self, parts: Sequence[Mapping[tuple[int, ...], Sequence[int]]]) -> None:
        """Give the rows whose tokens part a row of the cache each, and drop those without a running row, if enough.

        parts: for each row of the cache, the tokens that a pass appended → the rows that got them.
        """
        children = [
            (place, _Cached(running[0], tuple(running)))
            for place, part in enumerate(parts)
            for members in part.values()
            if (running := [row for row in members if not self._has_ended[row]])
        ]
        parents = [place for place, _ in children]
        if not children:
            self._cached = []
        elif len(set(parents)) < len(parents) or len(parts) - len(parents) >= COMPACT_FRACTION * len(parts):
            self._cache.keep(torch.tensor(parents, device=self._device))
            self._cached = [child for _, child in children]
        else:
            of_place = dict(children)
            self._cached = [
                of_place.get(place) or _Cached(next(iter(part.values()))[0] if part else self._cached[place].first, ())
                for place, part in enumerate(parts)
            ]

    def _forward(self, drafts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the logits [R, Q, vocab] after the last token of each cached row, and after each drafted one.

        drafts: the draft of each cached row. Q − 1 is the longest draft.
        """
        width = 1 + max(len(draft) for draft in drafts)
        inputs = np.zeros((len(drafts), width), dtype=np.int64)
        first, last = np.empty((len(drafts), 1), dtype=np.int64), np.empty((len(drafts), 1), dtype=np.int64)
        for place, (cached, draft) in enumerate(zip(self._cached, drafts, strict=True)):
            row = cached.first
            inputs[place, : 1 + len(draft)] = self.tokens[row][-1], *draft
            first[place] = self._prompt_tokens[row] + len(self.tokens[row]) - 1
            last[place] = first[place] + len(draft)
        columns = first + np.arange(width)
        # Padding has a column of its own after the draft, which the row's next pass overwrites.
        positions = torch.from_numpy(np.minimum(columns, last)).to(self._device)
        num_columns = int(columns.max()) + 1
        self._cache.place(torch.from_numpy(columns).to(self._device), num_columns)
        output = self._model(
            input_ids=torch.from_numpy(inputs).to(self._device),
            attention_mask=self._masks.of(positions, num_columns, self._model.dtype),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.logits

    def _append(self, row: int, drawn: Sequence[int]) -> int:
        """Append drawn tokens to a row, up to its end. Return how many were appended."""
        settings, tokens = self._rows[row], self.tokens[row]
        for number, token in enumerate(drawn, start=1):
            tokens.append(token)
            by_itself = token in settings.stop_ids or self._ends_by_text(row) or len(tokens) == settings.max_tokens
            if by_itself or self._ends_early(row):
                self._has_ended[row] = True
                return number
        return len(drawn)

    def _ends_early(self, row: int) -> bool:
        """Return whether ``Row.ends_early`` ends a row with its last token, and record where."""
        settings, tokens = self._rows[row], self.tokens[row]
        if settings.ends_early is None or len(tokens) % settings.look_every_tokens:
            return False
        if settings.ends_early(list(tokens)):
            self._early_ends[row] = len(tokens)
        return row in self._early_ends

    def _ends_by_text(self, row: int) -> bool:
        """Return whether a stop text ends a row with its last token, and record where."""
        texts, tokens = self._rows[row].stop_texts, self.tokens[row]
        if not texts:
            return False
        tail = self._decode(tokens[max(0, len(tokens) - 1 - max(len(text.encode()) for text in texts)) :])
        if any(text in tail for text in texts):
            self._text_ends[row] = len(tokens)
        return row in self._text_ends

    def decoded(self) -> Decoded:
        return self._draws.decoded(max(len(tokens) for tokens in self.tokens), self._text_ends, self._early_ends)

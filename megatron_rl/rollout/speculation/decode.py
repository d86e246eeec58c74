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
            batch.compact()
            started = time.perf_counter()
            asked = min(self._pace.width(len(running)), max(0, MAX_LOGITS // (len(running) * batch.vocab_size) - 1))
            found = batch.step({row: self._draft(batch, row, asked) for row in running})
            self._pace.note(asked, time.perf_counter() - started, [*found.values()])
            self.counts.note([*found.values()])
            for row, (drafted, accepted) in found.items():
                self._drafter.verified(row, drafted, accepted)

    def _draft(self, batch: _Batch, row: int, asked: int) -> Sequence[int]:
        most = min(asked, batch.room(row))
        return self._drafter.draft(row, batch.tokens[row], most) if most > 0 else ()


class _Batch:
    """Holds a batch of rows (samples): their tokens so far, and the cache of those that still run.

    tokens: each row's tokens.
    running: the numbers of the rows that have not ended.
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
        self._cache = RowCache(cache, mask.shape[1] - mask.sum(dim=1), prompt_of_row)
        self._prompt_tokens = positions[prompt_of_row, 0].tolist()
        self.vocab_size = logits.shape[-1]
        self._draws = Draws(rows, max(row.max_tokens for row in rows), self._device)
        self.tokens: list[list[int]] = [[] for _ in rows]
        self._text_ends: dict[int, int] = {}  # row → its length, for rows that a stop text ended
        self._early_ends: dict[int, int] = {}  # row → its length, for rows that ``Row.ends_early`` ended
        self._cached = list(range(len(rows)))  # the rows in the cache, in its order
        self._has_ended = [False] * len(rows)
        first = self._draws.take(logits[prompt_of_row], 0, torch.arange(len(rows), device=self._device))
        for row, token in enumerate(first.tolist()):
            self._append(row, [token])

    @property
    def running(self) -> list[int]:
        return [row for row in self._cached if not self._has_ended[row]]

    def room(self, row: int) -> int:
        """Return how many tokens may be drafted for a row, so that one more is within its maximum."""
        return self._rows[row].max_tokens - len(self.tokens[row]) - 1

    def step(self, drafts: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, int]]:
        """Run the model on each row's last token and its draft, and append the tokens that are drawn.

        drafts: running row → its draft.

        Returns running row → the tokens drafted and accepted.
        """
        logits = self._forward([drafts.get(row, ()) for row in self._cached])
        # Draw the tokens after each position of a draft; the positions of shorter drafts' padding are left out.
        places = [
            (place, at, len(self.tokens[row]) + at, row)
            for place, row in enumerate(self._cached)
            if row in drafts
            for at in range(len(drafts[row]) + 1)
        ]
        in_cache, at, steps, rows = torch.tensor(places, device=self._device).unbind(1)
        drawn = self._draws.take(logits[in_cache, at], steps, rows).tolist()
        # Accept each draft up to its first token that is not the drawn one.
        found, start = {}, 0
        for row in (row for row in self._cached if row in drafts):
            draft, own = drafts[row], drawn[start : start + len(drafts[row]) + 1]
            start += len(own)
            accepted = next((i for i, token in enumerate(draft) if token != own[i]), len(draft))
            found[row] = len(draft), min(accepted, self._append(row, own[: accepted + 1]))
        return found

    def _forward(self, drafts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the logits [R, Q, vocab] after the last token of each cached row, and after each drafted one.

        drafts: the draft of each cached row. Q − 1 is the longest draft.
        """
        width = 1 + max(len(draft) for draft in drafts)
        inputs = np.zeros((len(drafts), width), dtype=np.int64)
        first, last = np.empty((len(drafts), 1), dtype=np.int64), np.empty((len(drafts), 1), dtype=np.int64)
        for place, (row, draft) in enumerate(zip(self._cached, drafts, strict=True)):
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

    def compact(self) -> None:
        """Drop the ended rows from the cache, if they are enough."""
        staying = [place for place, row in enumerate(self._cached) if not self._has_ended[row]]
        if staying and len(self._cached) - len(staying) >= COMPACT_FRACTION * len(self._cached):
            self._cache.keep(torch.tensor(staying, device=self._device))
            self._cached = [self._cached[place] for place in staying]

    def decoded(self) -> Decoded:
        return self._draws.decoded(max(len(tokens) for tokens in self.tokens), self._text_ends, self._early_ends)

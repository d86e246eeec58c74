"""Decoding by a Hugging Face model: a batch of samples (rows), each with its own settings and random numbers.

Each row has its own random generator. So its tokens depend on the other rows of the batch only
through float rounding of the logits. The rows of a rollout's batch have equal settings. The rows of
requests to a server may differ in them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from megatron_rl.rollout.engines.drawing import distribution, inverted
from megatron_rl.rollout.engines.prefix_rows import PrefixRows
from megatron_rl.weights.families.register import family_of

if TYPE_CHECKING:
    from megatron_rl.rollout.engines.router_records import RouterRecords

Decode = Callable[[list[int]], str]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Holds how one sample is decoded.

    prompt: the index of the sample's prompt in the batch.
    seed: the seed of the sample's random numbers, below 2^64.
    max_tokens: the maximum of tokens to sample.
    temperature: the temperature of the distribution that tokens are drawn from. The log-probs are
        of this distribution, also if ``greedy``.
    greedy: whether each token is the most likely token instead of a draw.
    top_k: only the top_k most likely tokens are drawn; 0: all.
    top_p: only the most likely tokens with this total probability are drawn; 1: all.
    top: how many of the most likely tokens are reported at each step.
    stop_ids, stop_texts: tokens and texts that end the sample before ``max_tokens``, and are part
        of it.
    ends_early: a function of the sample's tokens so far that says whether the sample ends there
        (early_end.py). None: the sample ends by itself alone.
    look_every_tokens: after every this many tokens ``ends_early`` is called.
    """

    prompt: int
    seed: int
    max_tokens: int
    temperature: float
    greedy: bool = False
    top_k: int = 0
    top_p: float = 1.0
    top: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()
    ends_early: Callable[[list[int]], bool] | None = None
    look_every_tokens: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decoded:
    """Holds the rows (samples) that a batch generated. Entries beyond a row's length are meaningless.

    token_ids: int64 [steps, rows].
    logprobs: float32 [steps, rows].
    lengths: [rows], each row's number of tokens, with the stop token.
    stopped: [rows], whether a stop token or text ended the row.
    top_ids, top_logprobs: [steps, rows, most], the most likely tokens, where most is the largest
        ``Row.top``. The log-prob is −inf for a token that top_k or top_p excludes.
    ended_early: the rows that ``Row.ends_early`` ended.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    lengths: np.ndarray
    stopped: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    ended_early: Collection[int] = ()


def uniforms_of(rows: Sequence[Row], num_positions: int) -> np.ndarray:
    """Return float64 [num_positions, rows] in [0, 1): for each row (sample) the random numbers from its own seed."""
    raw = np.empty((len(rows), num_positions), dtype=np.uint64)
    for number, row in enumerate(rows):
        # random_raw, not Generator.random: NumPy keeps only the streams of bit generators fixed across
        # versions (NEP 19).
        raw[number] = np.random.Philox(key=row.seed).random_raw(num_positions)
    return (raw >> np.uint64(11)).T * 2.0**-53


def ends_of(
    token_ids: np.ndarray,
    rows: Sequence[Row],
    text_ends: Mapping[int, int] = MappingProxyType({}),
    early_ends: Mapping[int, int] = MappingProxyType({}),
) -> tuple[np.ndarray, np.ndarray]:
    """Return the length [rows] of each row (sample), and whether a stop token or text ended the row [rows].

    token_ids: [steps, rows].
    text_ends: row → the row's length at the end of its stop text. If a stop token comes earlier,
        the row ends there.
    early_ends: row → the row's length, for rows that ``Row.ends_early`` ended.
    """
    num_steps = len(token_ids)
    limits = np.array([early_ends.get(number, row.max_tokens) for number, row in enumerate(rows)])
    if len({row.stop_ids for row in rows}) == 1:
        is_stop = np.isin(token_ids, rows[0].stop_ids)
    else:
        is_stop = np.stack([np.isin(token_ids[:, i], row.stop_ids) for i, row in enumerate(rows)], axis=1)
    for number, length in text_ends.items():
        is_stop[length - 1, number] = True
    is_stop &= np.arange(num_steps)[:, None] < limits
    stopped = is_stop.any(axis=0)
    return np.where(stopped, is_stop.argmax(axis=0) + 1, np.minimum(num_steps, limits)), stopped


@torch.inference_mode()
def decode_rows(
    model: PreTrainedModel,
    prompts: Sequence[tuple[int, ...]],
    rows: Sequence[Row],
    decode: Decode,
    routers: RouterRecords | None = None,
) -> Decoded:
    """Generate a batch of rows (samples) to their ends, and return their tokens. Finished rows leave the batch.

    Samples of a prompt whose tokens are equal so far are computed once (prefix_rows.py).

    prompts: the prompts' token ids; several rows may share one (``Row.prompt``).
    decode: the tokenizer's function from token ids to their text, special tokens included.
    routers: records the experts of every forward pass; None: not needed.
    """
    device, max_steps = next(model.parameters()).device, max(row.max_tokens for row in rows)
    prefixes = PrefixRows(model, prompts, [row.prompt for row in rows], max_steps)
    if routers is not None:
        routers.begin(len(prompts), len(rows), max_steps)
    draws, ends = Draws(rows, max_steps, device), _Ends(rows, decode, device)
    running = torch.arange(len(rows), device=device)  # numbers of the rows that have not ended
    for step in range(max_steps):
        tokens = draws.take(prefixes.logits, step, running, prefixes.place)
        done = ends.after(tokens, step, running, draws.token_ids)
        num_done = int(done.sum()) if ends.come_early else 0
        if num_done == len(running) or step + 1 == max_steps:
            break
        stays = ~done if num_done else None
        if stays is not None:
            running, tokens = running[stays], tokens[stays]
        prefixes.advance(tokens, stays)
        if routers is not None:
            routers.note(step, running, prefixes.place, len(prefixes.logits))
    return draws.decoded(step + 1, ends.text_ends, ends.early_ends)


class Draws:
    """Draws the tokens of a batch's rows (samples). Keeps them, their log-probs and the most likely tokens."""

    def __init__(self, rows: Sequence[Row], max_steps: int, device: torch.device) -> None:
        self._rows, self._most = rows, max(row.top for row in rows)
        self.token_ids = torch.zeros(max_steps, len(rows), dtype=torch.long, device=device)
        self._logprobs = torch.zeros(max_steps, len(rows), dtype=torch.float32, device=device)
        self._top_ids = self.token_ids.new_zeros(max_steps, len(rows), self._most)
        self._top_logprobs = self._logprobs.new_zeros(max_steps, len(rows), self._most)
        greedy = [row.greedy for row in rows]
        self._uniforms = None if all(greedy) else torch.from_numpy(uniforms_of(rows, max_steps)).to(device)
        self._greedy = torch.tensor(greedy, device=device) if any(greedy) else None
        self._temperatures = torch.tensor([[row.temperature] for row in rows], device=device)
        self._temperature = rows[0].temperature if len({row.temperature for row in rows}) == 1 else None
        self._cuts: tuple[torch.Tensor, torch.Tensor] | None = None
        if any((row.top_k or row.top_p < 1) and not row.greedy for row in rows):
            uncut = torch.iinfo(torch.long).max
            top_k = [row.top_k if row.top_k and not row.greedy else uncut for row in rows]
            top_p = [1.0 if row.greedy else row.top_p for row in rows]
            self._cuts = torch.tensor(top_k, device=device), torch.tensor(top_p, device=device)

    def take(
        self, logits: torch.Tensor, step: int, running: torch.Tensor, place: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Draw the next token of each running row (sample); return the tokens, int64 [R].

        logits: [C, vocab].
        step: the number of tokens that were drawn before, for each row.
        running: int64 [R], the indices of the R rows that still run.
        place: int64 [R], the entry of ``logits`` of each running row; None: they are in its order.
        """
        if place is not None and (self._temperature is None or self._cuts is not None):
            logits, place = logits[place], None  # the settings may differ among samples of one entry
        temperature = self._temperatures[running] if self._temperature is None else self._temperature
        cuts = None if self._cuts is None else tuple(values[running] for values in self._cuts)
        logprobs = distribution(logits, temperature, cuts)
        rows = torch.arange(len(logits), device=logits.device) if place is None else place
        if self._uniforms is None:
            tokens = logits.argmax(dim=-1)[rows]
        else:
            tokens = inverted(logprobs, self._uniforms[step, running], place)
            if self._greedy is not None:
                tokens = torch.where(self._greedy[running], logits.argmax(dim=-1)[rows], tokens)
        self.token_ids[step, running] = tokens
        self._logprobs[step, running] = logprobs[rows, tokens]
        if self._most:
            top = torch.topk(logprobs, self._most, dim=-1)
            self._top_ids[step, running], self._top_logprobs[step, running] = top.indices[rows], top.values[rows]
        return tokens

    def decoded(self, num_steps: int, text_ends: Mapping[int, int], early_ends: Mapping[int, int]) -> Decoded:
        """Return the tokens, log-probs and lengths of all rows after ``num_steps`` steps.

        text_ends, early_ends: row → its length, for each row that a stop text, or
            ``Row.ends_early``, ended.
        """
        token_ids, logprobs, top_ids, top_logprobs = (
            values[:num_steps].cpu().numpy()
            for values in (self.token_ids, self._logprobs, self._top_ids, self._top_logprobs)
        )
        lengths, stopped = ends_of(token_ids, self._rows, text_ends, early_ends)
        return Decoded(
            token_ids=token_ids,
            logprobs=logprobs,
            lengths=lengths,
            stopped=stopped,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            ended_early=early_ends,
        )


class _Ends:
    """Finds the rows (samples) that end with their latest token.

    A row ends by a stop token, a stop text, ``max_tokens``, or ``Row.ends_early``.
    """

    def __init__(self, rows: Sequence[Row], decode: Decode, device: torch.device) -> None:
        self._rows, self._decode = rows, decode
        limits = [row.max_tokens for row in rows]
        self._uneven = min(limits) < max(limits)
        self._limits = torch.tensor(limits, device=device)
        self._shared = rows[0].stop_ids if len({row.stop_ids for row in rows}) == 1 else None
        most = max(len(row.stop_ids) for row in rows)
        if self._shared is None:
            padded = [[*row.stop_ids, *[-1] * (most - len(row.stop_ids))] for row in rows]
            self._stop_ids = torch.tensor(padded, dtype=torch.long, device=device)
        self._by_text = [number for number, row in enumerate(rows) if row.stop_texts]
        self.text_ends: dict[int, int] = {}  # row → its length, for rows that a stop text ended
        self._looked_at = [number for number, row in enumerate(rows) if row.ends_early is not None]
        self.early_ends: dict[int, int] = {}  # row → its length, for rows that ``Row.ends_early`` ended
        self.come_early = bool(most or self._uneven or self._by_text or self._looked_at)

    def after(self, tokens: torch.Tensor, step: int, running: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Return which of the R running rows (samples) are done after this step, bool [R].

        tokens: int64 [R], the step's tokens.
        step: the step's index, from 0.
        running: int64 [R], the indices of the running rows.
        token_ids: [steps, rows], the tokens of all rows so far.
        """
        if self._shared is None:
            done = (tokens[:, None] == self._stop_ids[running]).any(dim=1)
        else:
            done = torch.zeros_like(tokens, dtype=torch.bool)
            for stop_id in self._shared:
                done = done | (tokens == stop_id)
        if self._uneven:
            done = done | (self._limits[running] <= step + 1)
        if self._by_text:
            done = done | self._ended_by_text(step, running, token_ids)
        due = [number for number in self._looked_at if (step + 1) % self._rows[number].look_every_tokens == 0]
        return self._ended_early(due, done, step, running, token_ids) if due else done

    def _ended_by_text(self, step: int, running: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Return which running rows a stop text has ended, bool [R]. Only each row's last tokens are searched.

        The arguments are those of ``after``.
        """
        in_batch = set(running.tolist())
        for number in self._by_text:
            if number in in_batch and number not in self.text_ends:
                texts = self._rows[number].stop_texts
                first = max(0, step - max(len(text.encode()) for text in texts))
                tail = self._decode(token_ids[first : step + 1, number].tolist())
                if any(text in tail for text in texts):
                    self.text_ends[number] = step + 1
        ended = [number in self.text_ends for number in running.tolist()]
        return torch.tensor(ended, device=running.device)

    def _ended_early(
        self, due: Sequence[int], done: torch.Tensor, step: int, running: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return ``done`` with the rows that ``Row.ends_early`` ends after this step, bool [R].

        due: the rows that may be asked. A row that ends by itself at this step is not asked.
        The other arguments are those of ``after``.
        """
        asked, tokens, is_done = set(due), token_ids[: step + 1].cpu(), done.tolist()
        for place, number in enumerate(running.tolist()):
            row = self._rows[number]
            if number not in asked or is_done[place] or row.max_tokens <= step + 1:
                continue
            if row.ends_early(tokens[:, number].tolist()):
                self.early_ends[number] = step + 1
                is_done[place] = True
        return torch.tensor(is_done, device=done.device)


def counts_pads(model: PreTrainedModel) -> bool:
    """Return whether a model counts padding before a prompt as positions. Then its prompts may not be padded."""
    config = model.config.get_text_config()
    family = family_of(config.model_type)
    return family is not None and family.counts_pads(config)


def cut_batches(
    prompts: Sequence[T],
    length_of: Callable[[T], int],
    most: int,
    *,
    alike: bool,
    rows_of: Callable[[T], int] = lambda prompt: 1,
) -> Iterator[Sequence[T]]:
    """Yield batches of prompts in their order, each of at most ``most`` rows or of one prompt.

    length_of: a callable that returns a prompt's number of tokens.
    alike: whether a batch has prompts of one length only.
    rows_of: a callable that returns a prompt's number of rows (samples).

    Example: prompts a, b, c, d of lengths 2, 2, 2, 5, and ``most`` 2: [a, b], [c, d]. With
    ``alike``: [a, b], [c], [d].
    """
    start = 0
    while start < len(prompts):
        stop, rows, first = start + 1, rows_of(prompts[start]), length_of(prompts[start])
        while stop < len(prompts) and (rows := rows + rows_of(prompts[stop])) <= most:
            if alike and length_of(prompts[stop]) != first:
                break
            stop += 1
        yield prompts[start:stop]
        start = stop

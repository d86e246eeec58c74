"""Decoding by a Hugging Face model: a batch of samples (rows), each with its own settings and random numbers.

Each row has its own random generator. So its tokens depend on the other rows of the batch only
through float rounding of the logits. The rows of a rollout's batch have equal settings. The rows of
requests to a server may differ in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from megatron_rl.rollout.engines.drawing import distribution, inverted
from megatron_rl.rollout.engines.prefill import run_prompts

if TYPE_CHECKING:
    from megatron_rl.rollout.engines.router_records import RouterRecords

Decode = Callable[[list[int]], str]
# Dropping finished rows copies the cache of the others, which costs about one decode step's torch.cat.
# With less than a quarter finished, the saved rows do not pay for that copy within a few steps.
COMPACT_FRACTION = 0.25


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decoded:
    """Holds the rows (samples) that a batch generated. Entries beyond a row's length are meaningless.

    token_ids: int64 [steps, rows].
    logprobs: float32 [steps, rows].
    lengths: [rows], each row's number of tokens, with the stop token.
    stopped: [rows], whether a stop token or text ended the row.
    top_ids, top_logprobs: [steps, rows, most], the most likely tokens, where most is the largest
        ``Row.top``. The log-prob is −inf for a token that top_k or top_p excludes.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    lengths: np.ndarray
    stopped: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


def uniforms_of(rows: Sequence[Row], num_positions: int) -> np.ndarray:
    """Return float64 [num_positions, rows] in [0, 1): for each row (sample) the random numbers from its own seed."""
    raw = np.empty((len(rows), num_positions), dtype=np.uint64)
    for number, row in enumerate(rows):
        # random_raw, not Generator.random: NumPy keeps only the streams of bit generators fixed across
        # versions (NEP 19).
        raw[number] = np.random.Philox(key=row.seed).random_raw(num_positions)
    return (raw >> np.uint64(11)).T * 2.0**-53


def ends_of(
    token_ids: np.ndarray, rows: Sequence[Row], text_ends: Mapping[int, int] = MappingProxyType({})
) -> tuple[np.ndarray, np.ndarray]:
    """Return the length [rows] of each row (sample), and whether a stop token or text ended the row [rows].

    token_ids: [steps, rows].
    text_ends: row → the row's length at the end of its stop text. If a stop token comes earlier,
        the row ends there.
    """
    num_steps = len(token_ids)
    limits = np.array([row.max_tokens for row in rows])
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

    prompts: the prompts' token ids; several rows may share one (``Row.prompt``).
    decode: the tokenizer's function from token ids to their text, special tokens included.
    routers: records the experts of every forward pass; None: not needed.
    """
    device, max_steps = next(model.parameters()).device, max(row.max_tokens for row in rows)
    cache, logits, position, mask, padded = _run_rows(model, prompts, [row.prompt for row in rows], max_steps)
    prompt_width = mask.shape[1] - max_steps
    if routers is not None:
        routers.begin(len(prompts), len(rows), max_steps)
    draws, ends = Draws(rows, max_steps, device), _Ends(rows, decode, device)
    running = torch.arange(len(rows), device=device)  # numbers of the rows in the batch
    done = torch.zeros(len(rows), dtype=torch.bool, device=device)
    for step in range(max_steps):
        tokens = draws.take(logits, step, running)
        done = ends.after(done, tokens, step, running, draws.token_ids)
        num_done = int(done.sum()) if ends.come_early else 0  # the only wait for the device in this loop
        if num_done == len(running) or step + 1 == max_steps:
            break
        # Drop finished rows from the batch, then run the model on the others' tokens.
        if num_done >= COMPACT_FRACTION * len(running):
            staying = torch.nonzero(~done).squeeze(1)
            cache.reorder_cache(staying)
            running, tokens, position, mask, done = (
                tensor[staying] for tensor in (running, tokens, position, mask, done)
            )
        output = model(
            input_ids=tokens[:, None],
            attention_mask=mask[:, : prompt_width + step + 1] if padded else None,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
        )
        logits, position = output.logits[:, -1], position + 1
        if routers is not None:
            routers.note(step, running)
    return draws.decoded(step + 1, ends.text_ends)


def _run_rows(
    model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], prompt_of_row: Sequence[int], max_steps: int
) -> tuple[DynamicCache, torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """Run the model on each prompt once, and copy its outputs to each of the R rows (samples) that have the prompt.

    prompt_of_row: for each row the index of its prompt.
    max_steps: the maximum of tokens to generate.

    Returns the cache, the last position's logits [R, V], the next position [R, 1], the mask [R,
    longest prompt + max_steps], and whether any prompt is padded.
    """
    cache, logits, position, mask, padded = run_prompts(model, prompts)
    mask = torch.cat([mask, mask.new_ones(len(prompts), max_steps)], dim=1)
    if prompt_of_row != list(range(len(prompts))):
        chosen = torch.tensor(prompt_of_row, device=mask.device)
        cache.reorder_cache(chosen)  # batch_select_indices (transformers 5.19) knows no states of delta nets
        logits, position, mask = logits[chosen], position[chosen], mask[chosen]
    return cache, logits, position, mask, padded


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

    def take(self, logits: torch.Tensor, step: int, running: torch.Tensor) -> torch.Tensor:
        """Draw the next token of each running row (sample); return the tokens, int64 [R].

        logits: [R, vocab].
        step: the number of tokens that were drawn before, for each row.
        running: int64 [R], the indices of the R rows that still run.
        """
        temperature = self._temperatures[running] if self._temperature is None else self._temperature
        cuts = None if self._cuts is None else tuple(values[running] for values in self._cuts)
        logprobs = distribution(logits, temperature, cuts)
        if self._uniforms is None:
            tokens = logits.argmax(dim=-1)
        else:
            tokens = inverted(logprobs, self._uniforms[step, running])
            if self._greedy is not None:
                tokens = torch.where(self._greedy[running], logits.argmax(dim=-1), tokens)
        self.token_ids[step, running] = tokens
        self._logprobs[step, running] = logprobs.gather(1, tokens[:, None]).squeeze(1)
        if self._most:
            top = torch.topk(logprobs, self._most, dim=-1)
            self._top_ids[step, running], self._top_logprobs[step, running] = top.indices, top.values
        return tokens

    def decoded(self, num_steps: int, text_ends: Mapping[int, int]) -> Decoded:
        """Return the tokens, log-probs and lengths of all rows after ``num_steps`` steps.

        text_ends: row → its length, for each row that a stop text ended.
        """
        token_ids, logprobs, top_ids, top_logprobs = (
            values[:num_steps].cpu().numpy()
            for values in (self.token_ids, self._logprobs, self._top_ids, self._top_logprobs)
        )
        lengths, stopped = ends_of(token_ids, self._rows, text_ends)
        return Decoded(
            token_ids=token_ids,
            logprobs=logprobs,
            lengths=lengths,
            stopped=stopped,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )


class _Ends:
    """Finds the rows (samples) that end with their latest token: by a stop token, a stop text, or ``max_tokens``."""

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
        self.come_early = bool(most or self._uneven or self._by_text)

    def after(
        self, done: torch.Tensor, tokens: torch.Tensor, step: int, running: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return which of the R running rows (samples) are done after this step, bool [R].

        done: bool [R], the rows that were done before.
        tokens: int64 [R], the step's tokens.
        step: the step's index, from 0.
        running: int64 [R], the indices of the running rows.
        token_ids: [steps, rows], the tokens of all rows so far.
        """
        if self._shared is None:
            done = done | (tokens[:, None] == self._stop_ids[running]).any(dim=1)
        else:
            for stop_id in self._shared:
                done = done | (tokens == stop_id)
        if self._uneven:
            done = done | (self._limits[running] <= step + 1)
        return done | self._ended_by_text(step, running, token_ids) if self._by_text else done

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

"""Sampling by request with the embedded engine's model: rows of one batch, each with settings of its own.

A row's draws come from a generator of its own (its request's seed and its number), so that its tokens do not depend on
the rows that share its batch, beyond float rounding of the logits. With no cut, a temperature of 1 and the same seed
it draws what the engine's ``generate`` draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from megatron_rl.rollout.prefill import counts_pads, cut_batches, run_prompts
from megatron_rl.rollout.sampling import EMPTY, SampledSequence, SampleRequest, SampleResult, TopLogProbs

Decode = Callable[[list[int]], str]
LOGIT_ROWS = 256  # rows of a prompt's logits that exist at a time


@dataclass(slots=True, kw_only=True, eq=False)
class _Row:
    """Holds one sample under way."""

    request: SampleRequest
    uniforms: np.ndarray
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, token: int, logprob: float, decode: Decode) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        request = self.request
        if token in request.stop_ids or self._ends_a_text(decode):
            self.finish_reason = "stop"
        elif len(self.tokens) >= request.max_tokens:
            self.finish_reason = "length"

    def _ends_a_text(self, decode: Decode) -> bool:
        """Return whether a stop text stands in the last tokens; an earlier one would have ended the sample."""
        texts = self.request.stop_texts
        if not texts:
            return False
        tail = decode(self.tokens[-(max(len(text.encode()) for text in texts) + 1) :])
        return any(text in tail for text in texts)


def sample_requests(
    model: PreTrainedModel, decode: Decode, requests: Sequence[SampleRequest], *, max_rows: int
) -> list[SampleResult]:
    """Return the result of each request, in their order.

    decode: token ids → their text, special tokens too. max_rows: samples decoded at once.
    """
    results: dict[int, SampleResult] = {}
    order = sorted(range(len(requests)), key=lambda i: len(requests[i].token_ids))  # like lengths pad least
    rows = [(i, sample) for i in order for sample in range(requests[i].num_samples)]
    sequences: dict[int, list[SampledSequence]] = {i: [] for i in order}
    alike = counts_pads(model)
    for part in cut_batches(rows, lambda row: len(requests[row[0]].token_ids), max_rows, alike=alike):
        decoded = _decode_rows(model, decode, [_new_row(requests[i], sample) for i, sample in part])
        for (i, _), row in zip(part, decoded, strict=True):
            sequences[i].append(_finished(row))
    for i, request in enumerate(requests):
        logprobs, top = _read_prompt(model, request)
        results[i] = SampleResult(sequences=sequences[i], prompt_logprobs=logprobs, prompt_top=top)
    return [results[i] for i in range(len(requests))]


def _new_row(request: SampleRequest, sample: int) -> _Row:
    raw = np.random.Philox(key=request.seed + sample).random_raw(request.max_tokens)
    return _Row(request=request, uniforms=(raw >> np.uint64(11)) * 2.0**-53)


def _finished(row: _Row) -> SampledSequence:
    logprobs = np.array(row.logprobs, dtype=np.float32)
    if not np.isfinite(logprobs).all():
        raise RuntimeError(
            f"sample of request {row.request.request_id} has a log-prob that is not finite; the weights are broken (a "
            "step with a non-finite gradient?) or overflow in this dtype"
        )
    top = None
    if row.request.top:
        ids, values = zip(*row.top, strict=True)
        top = TopLogProbs(token_ids=np.stack(ids), logprobs=np.stack(values))
    return SampledSequence(
        token_ids=np.array(row.tokens, dtype=np.int32), logprobs=logprobs, finish_reason=row.finish_reason, top=top
    )


@torch.inference_mode()
def _decode_rows(model: PreTrainedModel, decode: Decode, rows: Sequence[_Row]) -> list[_Row]:
    """Sample rows to their ends, as one batch whose finished rows leave it."""
    device = next(model.parameters()).device
    prompts, index = _distinct([row.request.token_ids for row in rows])
    cache, logits, position, mask, padded = run_prompts(model, prompts)
    chosen = torch.tensor(index, device=device)
    if index != list(range(len(prompts))):
        cache.batch_select_indices(chosen)
    logits, position, mask = logits[chosen], position[chosen], mask[chosen]
    running = list(rows)
    while True:
        tokens = _draw_rows(logits, running, decode)
        kept = [i for i, row in enumerate(running) if row.finish_reason is None]
        if not kept:
            return list(rows)
        tokens = torch.tensor(tokens, device=device)
        if len(kept) < len(running):
            chosen = torch.tensor(kept, device=device)
            cache.batch_select_indices(chosen)
            running, tokens = [running[i] for i in kept], tokens[chosen]
            position, mask = position[chosen], mask[chosen]
        mask = torch.cat([mask, mask.new_ones(len(running), 1)], dim=1)
        output = model(
            input_ids=tokens[:, None],
            attention_mask=mask if padded else None,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
        )
        logits, position = output.logits[:, -1], position + 1


def _distinct(prompts: Sequence[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return the distinct prompts, each of which is run once, and each row's number among them."""
    numbers: dict[tuple[int, ...], int] = {}
    index = [numbers.setdefault(prompt, len(numbers)) for prompt in prompts]
    return list(numbers), index


def _draw_rows(logits: torch.Tensor, rows: Sequence[_Row], decode: Decode) -> list[int]:
    """Draw each row's next token, and let the row take it; return them."""
    logprobs = _processed(logits, [row.request for row in rows])
    uniforms = torch.tensor([row.uniforms[len(row.tokens)] for row in rows], dtype=torch.float64, device=logits.device)
    # as the engine's own draw: the first token whose cumulative probability exceeds the row's number
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1).clamp_(max=logits.shape[-1] - 1)
    greedy = torch.tensor([row.request.temperature == 0 for row in rows], device=logits.device)
    tokens = torch.where(greedy, logits.argmax(dim=-1), drawn)
    values = logprobs.gather(1, tokens[:, None]).squeeze(1).tolist()
    most = max(row.request.top for row in rows)
    top = torch.topk(logprobs, most, dim=-1) if most else None
    chosen = tokens.tolist()
    for i, row in enumerate(rows):
        if row.request.top:
            row.top.append(_top(top.indices[i], top.values[i], row.request.top))
        row.take(chosen[i], values[i], decode)
    return chosen


def _top(indices: torch.Tensor, values: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first ``count`` tokens and log-probs; a token that a cut has left out is EMPTY."""
    found = values[:count].float().cpu().numpy()
    gone = ~np.isfinite(found)
    return np.where(gone, 0, indices[:count].cpu().numpy()).astype(np.int32), np.where(gone, EMPTY, found).astype(
        np.float32
    )


def _processed(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """Return float32 [R, V], the log-probs of the distributions that the rows draw from."""
    temperatures = torch.tensor([request.temperature or 1.0 for request in requests], device=logits.device)
    logits = logits.float() / temperatures[:, None]
    if any((request.top_k or request.top_p < 1) and request.temperature for request in requests):
        logits = _cut(logits, requests)
    return torch.log_softmax(logits, dim=-1)


def _cut(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """Return the logits with −inf at tokens outside top_k, then outside the smallest set that has top_p."""
    size = logits.shape[-1]
    most = torch.tensor(
        [min(request.top_k, size) if request.top_k and request.temperature else size for request in requests],
        device=logits.device,
    )
    share = torch.tensor([request.top_p if request.temperature else 1.0 for request in requests], device=logits.device)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(torch.arange(size, device=logits.device) >= most[:, None], -torch.inf)
    before = ordered.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64).roll(1, dims=-1)
    before[:, 0] = 0.0
    ordered = ordered.masked_fill((before >= share[:, None]) & (share[:, None] < 1), -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter(1, order, ordered)


@torch.inference_mode()
def _read_prompt(model: PreTrainedModel, request: SampleRequest) -> tuple[np.ndarray | None, TopLogProbs | None]:
    """Return the log-probs of a prompt's tokens, and of the most likely ones, as far as they are asked for."""
    if not (request.prompt_logprobs or request.prompt_top):
        return None, None
    device, length = next(model.parameters()).device, len(request.token_ids)
    tokens = torch.tensor(request.token_ids, device=device)
    hidden = model.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
    logprobs = np.full(length, np.nan, dtype=np.float32)
    count = request.prompt_top
    ids, values = np.zeros((length, count), dtype=np.int32), np.full((length, count), EMPTY, dtype=np.float32)
    for first in range(0, length - 1, LOGIT_ROWS):
        rows = slice(first, min(first + LOGIT_ROWS, length - 1))
        places = slice(rows.start + 1, rows.stop + 1)
        distribution = model.lm_head(hidden[rows]).float().log_softmax(-1)
        logprobs[places] = distribution.gather(1, tokens[places, None]).squeeze(1).cpu().numpy()
        if count:
            top = distribution.topk(count, dim=-1)
            ids[places], values[places] = top.indices.cpu().numpy(), top.values.cpu().numpy()
    top = TopLogProbs(token_ids=ids, logprobs=values) if count else None
    return logprobs if request.prompt_logprobs else None, top

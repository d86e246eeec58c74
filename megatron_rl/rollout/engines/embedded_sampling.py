"""Sampling by request with the embedded engine's model: each request has its own settings, and one batch holds several.

A request at temperature 1 without top_k and top_p draws the same tokens as the engine's
``generate`` with the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from megatron_rl.rollout.engines.decoding import Decode, Decoded, Row, counts_pads, cut_batches
from megatron_rl.rollout.engines.sampling import EMPTY, SampledSequence, SampleRequest, SampleResult, TopLogProbs

LOGIT_ROWS = 256  # rows of a prompt's logits that are in memory at a time


def sample_requests(
    model: PreTrainedModel,
    decode: Decode,
    requests: Sequence[SampleRequest],
    decode_rows: Callable[..., Decoded],
    *,
    max_rows: int,
) -> list[SampleResult]:
    """Return the result of each request, in the order of the requests.

    decode: the tokenizer's function from token ids to their text, special tokens included.
    decode_rows: ``decode_rows`` (decoding.py), or a function that returns the same in another way.
    max_rows: the maximum of samples that are decoded at once.
    """
    results: dict[int, SampleResult] = {}
    order = sorted(range(len(requests)), key=lambda i: len(requests[i].token_ids))  # for the fewest pads
    rows = [(i, sample) for i in order for sample in range(requests[i].num_samples)]
    sequences: dict[int, list[SampledSequence]] = {i: [] for i in order}
    alike = counts_pads(model)
    for part in cut_batches(rows, lambda row: len(requests[row[0]].token_ids), max_rows, alike=alike):
        prompts = list(dict.fromkeys(requests[i].token_ids for i, _ in part))  # each prompt is run once
        numbers = {prompt: number for number, prompt in enumerate(prompts)}
        settings = [_row(requests[i], sample, numbers[requests[i].token_ids]) for i, sample in part]
        decoded = decode_rows(model, prompts, settings, decode)
        for number, (i, _) in enumerate(part):
            sequences[i].append(_sequence(decoded, number, requests[i]))
    for i, request in enumerate(requests):
        logprobs, top = _read_prompt(model, request)
        results[i] = SampleResult(sequences=sequences[i], prompt_logprobs=logprobs, prompt_top=top)
    return [results[i] for i in range(len(requests))]


def _row(request: SampleRequest, sample: int, prompt: int) -> Row:
    return Row(
        prompt=prompt,
        seed=request.seed + sample,
        max_tokens=request.max_tokens,
        temperature=request.temperature or 1.0,
        greedy=request.temperature == 0,
        top_k=request.top_k,
        top_p=request.top_p,
        top=request.top,
        stop_ids=request.stop_ids,
        stop_texts=request.stop_texts,
    )


def _sequence(decoded: Decoded, number: int, request: SampleRequest) -> SampledSequence:
    """Return row ``number`` (one sample) of a batch as a sample of its request.

    Raises RuntimeError for a log-prob that is not finite.
    """
    own = (slice(decoded.lengths[number]), number)
    logprobs = decoded.logprobs[own]
    if not np.isfinite(logprobs).all():
        raise RuntimeError(
            f"sample of request {request.request_id} has a log-prob that is not finite; the weights are broken (a "
            "step with a non-finite gradient?) or overflow in this dtype"
        )
    top = None
    if request.top:
        ids, values = decoded.top_ids[own][:, : request.top], decoded.top_logprobs[own][:, : request.top]
        gone = ~np.isfinite(values)  # tokens outside the cuts
        top = TopLogProbs(
            token_ids=np.where(gone, 0, ids).astype(np.int32),
            logprobs=np.where(gone, EMPTY, values).astype(np.float32),
        )
    return SampledSequence(
        token_ids=decoded.token_ids[own].astype(np.int32),
        logprobs=logprobs,
        finish_reason="stop" if decoded.stopped[number] else "length",
        top=top,
    )


@torch.inference_mode()
def _read_prompt(model: PreTrainedModel, request: SampleRequest) -> tuple[np.ndarray | None, TopLogProbs | None]:
    """Return the log-probs of a prompt's tokens, and the most likely tokens at each of its positions.

    Each of the two is None if it is not requested.
    """
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

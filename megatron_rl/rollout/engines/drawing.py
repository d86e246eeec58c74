"""Draws of each sample's next token from its distribution, by the inverse of the cumulative probabilities.

The distribution is the softmax of the logits divided by the temperature, limited by top_k and
top_p.
"""

from __future__ import annotations

import torch


def draw(logits: torch.Tensor, temperature: float, uniforms: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row (sample); return the ids, int64 [R], and their log-probs at ``temperature``, float32 [R].

    logits: [R, vocab], one row for each of R samples.
    uniforms: float64 [R] in [0, 1), each row's random number. None: the most likely tokens are
        taken.
    """
    logprobs = distribution(logits, temperature)
    tokens = logits.argmax(dim=-1) if uniforms is None else inverted(logprobs, uniforms)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def distribution(
    logits: torch.Tensor, temperature: float | torch.Tensor, cuts: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor:
    """Return the log-probs of the distributions that the rows' tokens are drawn from, float32 [R, vocab].

    logits: [R, vocab], one row for each of R samples.
    temperature: one number for all rows, or [R, 1].
    cuts: top_k and top_p of the rows (see ``cut``); None: no row is limited by them.
    """
    scaled = logits.float() / temperature
    return torch.log_softmax(scaled if cuts is None else cut(scaled, *cuts), dim=-1)


def inverted(logprobs: torch.Tensor, uniforms: torch.Tensor, place: torch.Tensor | None = None) -> torch.Tensor:
    """Return for each row the first token, int64 [R], whose cumulative probability exceeds the row's random number.

    So a token of probability 0 is never drawn.

    logprobs: float32 [C, vocab], distributions.
    uniforms: float64 [R] in [0, 1), the random numbers.
    place: int64 [R], the distribution of each row; None: the rows have one each, in their order.
    """
    # float64: over 150,000 tokens the error of a float32 sum is larger than a rare token's probability.
    # The number is scaled by the row's total, which rounding keeps from being exactly 1.
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    if place is not None:
        cumulative = cumulative[place]
    total = cumulative[:, -1]
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    return tokens.clamp_(max=logprobs.shape[-1] - 1)  # for NaN logits, which the caller reports after decoding


def cut(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the logits [R, vocab] of R samples, with −inf at the tokens that top_k or top_p excludes.

    top_k: int64 [R], the number of most likely tokens to keep. A number of at least the
        vocabulary's size keeps all.
    top_p: float32 [R], a probability. Of the tokens that top_k keeps, only the smallest set of most
        likely tokens with this total probability is kept. 1 keeps all.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    outside = torch.arange(logits.shape[-1], device=logits.device) >= top_k[:, None]
    ordered = ordered.masked_fill(outside, -torch.inf)
    before = ordered.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64).roll(1, dims=-1)
    before[:, 0] = 0.0
    ordered = ordered.masked_fill((before >= top_p[:, None]) & (top_p[:, None] < 1), -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter(1, order, ordered)

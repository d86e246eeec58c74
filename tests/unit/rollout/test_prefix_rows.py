"""Samples that share a row of the cache against a naive loop that computes each sample alone, token by token."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.rollout.engines.decoding import Row, decode_rows, uniforms_of
from megatron_rl.rollout.engines.drawing import draw
from megatron_rl.rollout.engines.prefix_rows import COMPACT_FRACTION
from tests.unit.rollout.tiny_model import EOS, ROUNDING, VOCAB, _model

PROMPTS = [(5, 9, 3), (4,), (7, 2, 8, 6, 5)]
STEPS = 10


def rows_of(prompt_of_sample: list[int], temperature: float = 0.3, **given: object) -> list[Row]:
    settings = {"max_tokens": STEPS, "temperature": temperature, "stop_ids": (EOS,)} | given
    return [Row(prompt=prompt, seed=100 + number, **settings) for number, prompt in enumerate(prompt_of_sample)]


@torch.no_grad()
def alone(model: torch.nn.Module, row: Row) -> tuple[list[int], list[float]]:
    """Return a sample's tokens and log-probs by a forward pass over the whole sequence for each token."""
    tokens, logprobs, uniforms = [], [], torch.from_numpy(uniforms_of([row], row.max_tokens)[:, 0])
    while len(tokens) < row.max_tokens and EOS not in tokens:
        logits = model(torch.tensor([[*PROMPTS[row.prompt], *tokens]])).logits[:, -1]
        token, logprob = draw(logits, row.temperature, None if row.greedy else uniforms[len(tokens), None])
        tokens.append(int(token))
        logprobs.append(float(logprob))
    return tokens, logprobs


def decoded(model: torch.nn.Module, rows: list[Row]) -> tuple[list[list[int]], list[np.ndarray], list[int]]:
    """Return each sample's tokens and log-probs, and the rows that each pass after the prompts' had."""
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, _, given: sizes.append(len(given["input_ids"])), with_kwargs=True
    )
    try:
        found = decode_rows(model, PROMPTS, rows, lambda ids: "".join(VOCAB[i] for i in ids))
    finally:
        hook.remove()
    assert sizes[0] == len(PROMPTS)
    each = [(slice(length), row) for row, length in enumerate(found.lengths)]
    return [found.token_ids[x].tolist() for x in each], [found.logprobs[x] for x in each], sizes[1:]


def distinct_prefixes(tokens: list[list[int]], rows: list[Row], step: int) -> int:
    """Return how many distinct prefixes of ``step`` tokens have another token after them."""
    return len({(row.prompt, *own[:step]) for own, row in zip(tokens, rows, strict=True) if len(own) > step})


@pytest.mark.parametrize("temperature", [0.05, 0.3, 1.0])
@pytest.mark.parametrize(
    "prompt_of_sample",
    [[0] * 12 + [1] * 12 + [2] * 12, [2, 0, 1, 0, 2, 2, 0, 1], [2, 0, 1], [1] * 9],
    ids=["groups", "mixed", "one_each", "prompts_without_samples"],
)
def test_samples_equal_those_computed_alone_and_each_prefix_is_computed_once(temperature, prompt_of_sample):
    model, rows = _model(), rows_of(prompt_of_sample, temperature)
    tokens, logprobs, sizes = decoded(model, rows)
    for row, ids, own in zip(rows, tokens, logprobs, strict=True):
        wanted_ids, wanted = alone(model, row)
        assert ids == wanted_ids
        assert (
            np.abs(own - wanted).max() < ROUNDING / temperature
        )  # which divides the logits, and so multiplies their rounding
    # A pass has a row for each distinct prefix, and fewer than a quarter of its rows are of samples that have ended.
    for step, size in enumerate(sizes, start=1):
        wanted = distinct_prefixes(tokens, rows, step)
        assert wanted <= size and (size - wanted) < COMPACT_FRACTION * size + 1
    assert len(sizes) == max(map(len, tokens)) - 1


def test_equal_samples_have_equal_logprobs_to_the_bit_and_greedy_ones_take_one_row():
    rows = rows_of([0] * 16 + [1] * 16, 0.05)
    tokens, logprobs, sizes = decoded(_model(), rows)
    groups: dict[tuple, list[np.ndarray]] = {}
    for row, ids, own in zip(rows, tokens, logprobs, strict=True):
        groups.setdefault((row.prompt, *ids), []).append(own)
    assert 2 < len(groups) < 24 and max(map(len, groups.values())) > 3
    assert all(np.array_equal(own[0], other) for own in groups.values() for other in own)
    _, _, greedy = decoded(_model(), rows_of([0] * 16 + [1] * 16, greedy=True))
    assert max(greedy) <= 2 < max(sizes)


def test_samples_of_a_prompt_may_have_settings_of_their_own():
    """Temperatures, cuts and limits differ among samples that share a row."""
    kinds = [{"temperature": 0.2}, {"temperature": 0.9}, {"greedy": True}, {"max_tokens": 4}, {"max_tokens": 1}]
    rows = [
        Row(prompt=number % 2, seed=number, **{"max_tokens": STEPS, "temperature": 0.5, "stop_ids": (EOS,)} | kind)
        for number, kind in enumerate(kinds * 4)
    ]
    tokens, _, _ = decoded(_model(), rows)
    assert tokens == [alone(_model(), row)[0] for row in rows]
    # top_k=1 is greedy, whatever is drawn beside it
    cut = [*rows_of([0] * 4, 1.0, top_k=1), *rows_of([0] * 4, 1.0)]
    tokens, _, _ = decoded(_model(), cut)
    greedy = alone(_model(), SimpleNamespace(prompt=0, seed=0, max_tokens=STEPS, temperature=1.0, greedy=True))[0]
    assert tokens[:4] == [greedy] * 4 and len({*map(tuple, tokens[4:])}) > 1

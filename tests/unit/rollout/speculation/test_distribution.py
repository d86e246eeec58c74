"""Samples with drafts have the model's own distribution: a chi-square of their second and third tokens."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

from tests.unit.rollout.fake_engine import prompt_of
from tests.unit.rollout.speculation.drafters import speculating
from tests.unit.rollout.tiny_model import EOS, engine_of

PROMPT, COUNT, LEAST = (2, 5, 3), 6000, 8.0  # LEAST: expected samples of a cell; rarer pairs share one


def exact(model, temperature: float) -> Counter[tuple[int, ...]]:
    """Return the probability of each pair of second and third tokens; shorter ones are of samples that ended."""

    def following(beginnings: list[tuple[int, ...]]) -> list[list[float]]:
        with torch.no_grad():
            logits = model(torch.tensor([(*PROMPT, *tokens) for tokens in beginnings])).logits[:, -1].double()
        return (logits / temperature).softmax(-1).tolist()

    (first,), found = following([()]), Counter({(): 0.0})
    found[()] = first[EOS]
    going_on = [a for a in range(len(first)) if a != EOS]
    for a, second in zip(going_on, following([(a,) for a in going_on]), strict=True):
        found[EOS,] += first[a] * second[EOS]
        for b, third in zip(going_on, following([(a, b) for b in going_on]), strict=True):
            for c, p in enumerate(third):
                found[b, c] += first[a] * second[b] * p
    return found


@pytest.mark.parametrize("temperature", [0.4, 1.0])
def test_pairs_of_samples_with_drafts_have_the_models_distribution(model, hf_path, temperature):
    """Drafts are the answers of the visit before. The third token is drawn after the second of a draft, or of a pass.

    The expected counts come from forward passes over every beginning.
    """
    engine = engine_of(hf_path, model, temperature=temperature, max_response_tokens=4, max_batch_samples=500)
    decoder = speculating(engine, asked=2)
    engine.generate([prompt_of(0, token_ids=PROMPT)], 500)
    decoder.counts.take()
    again = dataclasses.replace(prompt_of(0, token_ids=PROMPT), attempt=1)
    found = Counter(rollout.response_ids[1:3] for rollout in engine.generate([again], COUNT))
    assert decoder.counts.accepted > 0.05 * decoder.counts.drafted and decoder.counts.drafted > 0.9 * COUNT
    pairs = exact(model, temperature)
    assert set(found) <= set(pairs) and sum(pairs.values()) == pytest.approx(1.0, abs=1e-9)
    common = [pair for pair, p in pairs.items() if p * COUNT >= LEAST]
    rest = 1.0 - sum(pairs[pair] for pair in common)
    cells = [(found[pair], pairs[pair] * COUNT) for pair in common]
    cells.append((COUNT - sum(seen for seen, _ in cells), rest * COUNT))
    chi_square = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    chance = torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(chi_square / 2)).item()
    assert len(cells) > 50 and chance > 1e-3, (chance, len(cells))

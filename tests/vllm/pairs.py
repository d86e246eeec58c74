"""The chi-square test of the first two tokens that an engine samples against their exact distribution."""

from collections import Counter
from dataclasses import replace

import torch

from tests.vllm.rig import Bench, make_prompts

LEAST = 5.0  # expected samples of a cell; rarer pairs share one


@torch.no_grad()
def pair_probabilities(model, prompt, temperature: float, stop: int) -> dict[tuple[int, ...], float]:
    """Return the exact probability of each first pair of tokens, and of the stop token alone."""
    ids = torch.tensor([prompt])
    vocabulary = model.config.vocab_size
    first = torch.softmax(model(ids).logits[0, -1].double() / temperature, dim=-1)
    after = torch.cat([ids.expand(vocabulary, -1), torch.arange(vocabulary)[:, None]], dim=1)
    second = torch.softmax(model(after).logits[:, -1].double() / temperature, dim=-1)
    pairs = {(a, b): float(first[a] * second[a, b]) for a in range(vocabulary) for b in range(vocabulary) if a != stop}
    return pairs | {(stop,): float(first[stop])}


def chance_of_pairs(bench: Bench, place: int, length: int, calls: int, samples: int) -> float:
    """Return the chance that a right engine's pairs are as far from the distribution as this engine's, or farther.

    place: of the prompt in its test; the samples' seeds depend on it.
    length: of the prompt.
    calls, samples: calls of the engine, and samples of the prompt in each.
    """
    (prompt,) = make_prompts(length)
    asked = [replace(prompt, prompt_id=f"{place}@{call}") for call in range(calls)]
    rollouts = bench.engine.generate(asked, samples, max_tokens=[3] * calls)
    found = Counter(x.response_ids[:2] for x in rollouts)
    wanted = pair_probabilities(bench.model, prompt.token_ids, bench.config.rollout.temperature, stop=0)
    total = calls * samples
    assert sum(found.values()) == total and set(found) <= set(wanted)
    often = [pair for pair, chance in wanted.items() if chance * total >= LEAST]
    rare = total - sum(found[pair] for pair in often), total * (1 - sum(wanted[pair] for pair in often))
    cells = [*((found[pair], total * wanted[pair]) for pair in often), *([rare] if rare[1] >= LEAST else [])]
    scale = sum(x for x, _ in cells) / sum(x for _, x in cells)
    statistic = sum((x - wanted_x * scale) ** 2 / (wanted_x * scale) for x, wanted_x in cells)
    chance = torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2).double(), torch.tensor(statistic / 2))
    print(f"length {length}: {len(cells)} cells, p = {chance:.3f}")
    return float(chance)

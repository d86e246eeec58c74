"""The exact distribution of a sample's first two tokens, and a chi-square test of what an engine drew."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

LEAST = 5.0  # expected samples of a cell; rarer pairs share one
Pairs = Mapping[tuple[int, ...], float]


def cut(chances: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Return a distribution [vocabulary] within its ``top_k`` likeliest tokens, and those of ``top_p`` in total."""
    kept, total = torch.zeros_like(chances), 0.0
    for number, token in enumerate(chances.argsort(descending=True).tolist()):
        if (top_k and number == top_k) or total >= top_p:
            break
        kept[token] = chances[token]
        total += float(chances[token])
    return kept / kept.sum()


@torch.no_grad()
def pair_probabilities(
    model, prompt: Sequence[int], temperature: float, stop: int, *, top_k: int = 0, top_p: float = 1.0
) -> Pairs:
    """Return the exact probability of each possible first pair of tokens, and of the stop token alone."""
    ids = torch.tensor([prompt])
    vocabulary = model.config.vocab_size
    after = torch.cat([ids.expand(vocabulary, -1), torch.arange(vocabulary)[:, None]], dim=1)
    logits = torch.cat([model(ids).logits[:, -1], model(after).logits[:, -1]]).double()
    first, *second = (cut(x, top_k, top_p) for x in torch.softmax(logits / temperature, dim=-1))
    pairs = {(a, b): float(first[a] * second[a][b]) for a in range(vocabulary) for b in range(vocabulary) if a != stop}
    return {pair: chance for pair, chance in (pairs | {(stop,): float(first[stop])}).items() if chance > 0}


def chance_of(found: Counter[tuple[int, ...]], wanted: Pairs) -> float:
    """Return how likely a right engine's samples are at least as far from their distribution as these (chi-square)."""
    total = sum(found.values())
    often = [pair for pair, chance in wanted.items() if chance * total >= LEAST]
    rare = total - sum(found[pair] for pair in often), total * (1 - sum(wanted[pair] for pair in often))
    cells = [*((found[pair], total * wanted[pair]) for pair in often), *([rare] if rare[1] >= LEAST else [])]
    scale = sum(x for x, _ in cells) / sum(x for _, x in cells)
    statistic = sum((x - wanted_x * scale) ** 2 / (wanted_x * scale) for x, wanted_x in cells)
    chance = torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2).double(), torch.tensor(statistic / 2).double())
    print(f"{total} samples, {len(cells)} cells, p = {chance:.3g}")
    return float(chance)

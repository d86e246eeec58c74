"""Optimizer steps and reduction weights by a naive loop."""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np

from tests.reference import token_weight

DENOMINATORS, STEPS = ("original", "kept"), ("match", "merge")
MAX_RESPONSE_TOKENS = 16


def naive_steps(masks: list[np.ndarray], groups: list[int], advantages: list[float], size: int | None, *,
                reduction: str, denominator: str, steps: str) -> Iterator[tuple[list[int], dict[int, float]]]:
    """Yield (samples that run, the weight of each one's loss tokens) of every step; nothing runs in a ghost."""
    everyone = list(range(len(masks)))
    size = len(everyone) if steps == "merge" or size is None else size
    for start in range(0, len(everyone), size):
        members = everyone[start : start + size]
        live = [i for i in members if advantages[i] != 0 and masks[i].any()]
        counted = [i for i in (members if denominator == "original" else live) if masks[i].any()]
        rows, prompts = [SimpleNamespace(loss_mask=masks[i]) for i in counted], [groups[i] for i in counted]
        yield live, {i: token_weight(reduction, rows, prompts, counted.index(i), MAX_RESPONSE_TOKENS) for i in live}

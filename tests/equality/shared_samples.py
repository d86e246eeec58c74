"""Samples whose groups have one prompt each, for the tests of prompts that run once."""

import numpy as np

from megatron_rl.types import Sample
from tests.reference import sample_of

SHARED = "plan.share_prompts=true"
# Samples by group: prompts of one token, of many, and a group of one; no two of these groups share a prompt.
GROUPS = ((7, (3, 5, 1, 9)), (1, (4, 2, 6)), (5, (8,)), (11, (1, 1, 2, 12, 3)))


def group_samples(vocab_size: int = 99) -> tuple[list[Sample], list[int]]:
    """Return samples whose groups have one prompt each, with masks that have holes, and their groups."""
    random = np.random.default_rng(5)
    samples, groups = [], []
    for number, (prompt_tokens, responses) in enumerate(GROUPS):
        prompt = random.integers(2, vocab_size, prompt_tokens)
        for response in responses:
            mask = np.ones(response, dtype=bool)
            if response > 3:
                mask[random.integers(0, response - 1)] = False
            if response > 7:
                mask[-2:] = False
            tokens = np.concatenate([prompt, random.integers(2, vocab_size, response)])
            given = dict(loss_mask=mask, logprobs=random.normal(-2.0, 0.3, response).astype(np.float32))
            samples.append(sample_of(f"g{number}s{len(samples)}", tokens, response, **given))
            groups.append(number)
    return samples, groups


def advantages_of(count: int) -> np.ndarray:
    """Return advantages of both signs; every fourth sample has none, and of the second group one sample alone has."""
    found = np.array([0.0 if i % 4 == 2 else (i - count / 2) / 3 for i in range(count)])
    found[[4, 6]] = 0.0
    return found

"""Reward functions for tests, by dotted path: ``tests.reward_functions:<name>``."""

import random
import time


def explode_on_seven(prompts, completions, completion_ids, answer, **columns):
    """Raise on prompts that start with 7; else reward completions by the parity of their length."""
    for prompt in prompts:
        if prompt.startswith("7"):
            raise RuntimeError(f"no reward for {prompt}")
    return [float(len(ids) % 2) for ids in completion_ids]


def broken(prompts, completions, completion_ids, **columns):
    return [float(text == undefined_name) for text in completions]  # noqa: F821


def infinite(prompts, completions, completion_ids, **columns):
    return [float("inf")] * len(prompts)


def huge(prompts, completions, completion_ids, **columns):
    """Return ±3e38 by the parity of the length: numbers of float32, and twice them are not."""
    return [3e38 * (2 * (len(ids) % 2) - 1) for ids in completion_ids]


def parity(prompts, completions, completion_ids, **columns):
    """Return 1 for a completion with an odd number of tokens, else 0: groups are mixed under any policy."""
    return [float(len(ids) % 2) for ids in completion_ids]


def constant(prompts, completions, completion_ids, **columns):
    """Return 1 for every completion, so that no group ever has signal."""
    return [1.0] * len(prompts)


def mostly_dead(prompts, completions, completion_ids, answer, **columns):
    """Return 0 for two prompts of three, whatever is answered; reward the others as ``parity`` does."""
    return [
        float(len(ids) % 2) if int(right) % 3 == 0 else 0.0 for right, ids in zip(answer, completion_ids, strict=True)
    ]


def unsteady(prompts, completions, completion_ids, **columns):
    """Reward as ``parity`` does, after a random wait each time: chance decides which finishes first."""
    time.sleep(random.SystemRandom().uniform(0.0, 0.05))
    return parity(prompts, completions, completion_ids)


def graded(prompts, completions, completion_ids, **columns):
    """Return the share of odd token ids: any policy earns some, and another one for nearly every completion."""
    return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]


def picky(prompts, completions, completion_ids, **columns):
    """Raise if the token ids of a completion add up to a multiple of 3; reward the others as ``parity`` does."""
    for ids in completion_ids:
        if sum(ids) % 3 == 0:
            raise ConnectionError(f"the judge of {sum(ids)} is away")
    return parity(prompts, completions, completion_ids)

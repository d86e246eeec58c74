"""Reward functions for tests, by dotted path: ``tests.reward_functions:<name>``."""


def explode_on_seven(prompts, completions, completion_ids, answer, **columns):
    """Raises on prompts that start with 7; else rewards completions by the parity of their length."""
    for prompt in prompts:
        if prompt.startswith("7"):
            raise RuntimeError(f"no reward for {prompt}")
    return [float(len(ids) % 2) for ids in completion_ids]


def infinite(prompts, completions, completion_ids, **columns):
    return [float("inf")] * len(prompts)


def parity(prompts, completions, completion_ids, **columns):
    """1 where a completion has an odd number of tokens: groups are mixed under any policy."""
    return [float(len(ids) % 2) for ids in completion_ids]


def constant(prompts, completions, completion_ids, **columns):
    """No group ever has signal."""
    return [1.0] * len(prompts)


def not_applicable_to_even_answers(prompts, completions, completion_ids, answer, **columns):
    return [None if int(a) % 2 == 0 else 1.0 for a in answer]

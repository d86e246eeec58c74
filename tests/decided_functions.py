"""Functions for ``reward.decided`` in tests, each with the reward function whose value it knows early."""


def starts_even(prompts, completions, completion_ids, **columns):
    """Return the first token's parity, and so a reward that the first token fixes."""
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def after_one_token(prompt, completion, completion_ids, **columns):
    """Know ``starts_even`` of every beginning."""
    return True


def if_even(completion_ids, **columns):
    """Know ``starts_even`` of the samples that it rewards, and say nothing of the others."""
    return completion_ids[0] % 2 == 0


def has_three(prompts, completions, completion_ids, answer, **columns):
    """Return 1 for a response with token 3 anywhere."""
    return [float(3 in ids) for ids in completion_ids]


def three_is_there(prompt, completion, completion_ids, answer, **columns):
    """Know ``has_three``: it is fixed once the token is there."""
    return 3 in completion_ids


def three_is_not_there(completion_ids, **columns):
    """Break the contract of ``has_three``: token 3 may still come."""
    return 3 not in completion_ids


def fails(completion_ids, **columns):
    raise LookupError("no verdict")


def leaves(completion_ids, **columns):
    raise SystemExit(0)


def returns_a_number(completion_ids, **columns):
    return 1.0


async def waits(completion_ids, **columns):
    return True


def takes_little(completion):
    return True


def needs_difficulty(completion, difficulty, **columns):
    return False

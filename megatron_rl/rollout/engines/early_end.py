"""The interface of a function that ends samples early to the inference engines, and the rule of where they end.

A sample of at least L tokens ends after m tokens if m is the first multiple of ``every_tokens``
below L after which ``EarlyEnd.ends`` returns True. L is the length at which the sample would end by
itself. So the end depends on the sample's tokens alone, and not on an engine's speed or batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_rl.types import Prompt

DECIDED = "decided"  # the ``Rollout.finish_reason`` of a sample that ended early


class EarlyEnd(Protocol):
    """Says of a running sample that it ends now.

    every_tokens: a sample is looked at after every this many tokens.
    """

    every_tokens: int

    def ends(self, prompt: Prompt, sample_index: int, token_ids: Sequence[int]) -> bool:
        """Return whether a sample ends after these tokens of its response. Any thread may call this."""
        ...


def first_end(
    early_end: EarlyEnd,
    prompt: Prompt,
    sample_index: int,
    token_ids: Sequence[int],
    *,
    after: int = 0,
    whole: bool = True,
) -> int | None:
    """Return after how many tokens a sample ends early; None if these tokens bring no early end.

    after: the sample was looked at up to this number of tokens before, and did not end there.
    whole: whether the sample ended by itself after ``token_ids``. If it still runs, it may end
        early at their last token too.

    Example: with ``every_tokens=4`` and 8 tokens, the sample is looked at after 4 tokens, and after
    8 only if ``whole`` is False.
    """
    every = early_end.every_tokens
    first = (after // every + 1) * every
    for length in range(first, len(token_ids) + (0 if whole else 1), every):
        if early_end.ends(prompt, sample_index, token_ids[:length]):
            return length
    return None

"""The built-in reward function ``arithmetic``: exact match, for answers that have only one spelling."""

from __future__ import annotations

from collections.abc import Sequence


def arithmetic(
    prompts: Sequence[str],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[object],
    **_: object,
) -> list[float]:
    """Return one number per sample: 1.0 if the completion's stripped text equals the stripped ``answer``, else 0.0.

    answer: the dataset's column ``answer``.

    Example: completions ``["12", " 12 ", "12.0"]`` with answers ``["12", 12, "12"]`` score ``[1.0,
    1.0, 0.0]``.
    """
    return [float(text.strip() == str(gold).strip()) for text, gold in zip(completions, answer, strict=True)]

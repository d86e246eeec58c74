"""Defines the reward function that reward_pool.py scores in workers, and the same value for its check."""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Sequence

HANG_S = 3600.0


def value_of(prompt: str, completion: str, ids: Sequence[int], answer: str) -> float:
    """Return a number made of all of a sample's arguments, so that another sample's arguments give another number."""
    return float(zlib.crc32(repr((prompt, completion, list(ids), answer)).encode()))


def misbehave(
    prompts: Sequence[str],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[str],
    journal: Sequence[str],
    **_: object,
) -> list[float]:
    """Return [S] the value of each sample; one whose text begins with raise, hang or kill does that.

    journal: a file in which every hang is noted.

    Example: completions ``["answer 0", "raise 1"]`` raise RuntimeError; ``["answer 0"]`` alone gives its value.
    """
    for text, file in zip(completions, journal, strict=True):
        word, _, number = text.partition(" ")
        if word == "raise":
            raise RuntimeError(f"no reward for {text!r}")
        if word == "hang":
            note(file, f"{os.getpid()} {number} {time.time()}\n")
            time.sleep(HANG_S)
        if word == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    return [value_of(*row) for row in zip(prompts, completions, completion_ids, answer, strict=True)]


def note(file: str, line: str) -> None:
    """Append a line in one write to a file that other processes write to as well."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)

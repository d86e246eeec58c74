"""Reads the ``stop`` of a request: the tokens and texts that end a sample. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.errors import quoted
from megatron_rl.serve.values import RequestError


def stops_of(
    stop: str | Sequence[str] | Sequence[int] | None, own: Sequence[int], vocab_size: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the tokens and the texts that end a sample.

    stop: None for the model's own ends of sequence; [] for none at all; else these alone, texts or tokens.
    own: the model's ends of sequence.

    Example: ``["\\n\\n"]`` → ``((), ("\\n\\n",))``: an end of sequence does not end the sample then.
    """
    if stop is None:
        return tuple(own), ()
    if isinstance(stop, str):
        return (), (stop,)
    if any(isinstance(part, str) for part in stop):
        return (), tuple(stop)
    if outside := [token for token in stop if not 0 <= token < vocab_size]:
        raise RequestError(f"stop holds token {quoted(outside[0])}, and the vocabulary has {vocab_size} tokens")
    return tuple(stop), ()

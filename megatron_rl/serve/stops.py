"""Reads the ``stop`` of a request: the tokens and texts that end a sample. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.serve.values import RequestError

MOST = 64  # stops of a request


def stops_of(stop: object, own: Sequence[int], vocab_size: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the tokens and the texts that end a sample.

    stop: None for the model's own ends of sequence; [] for none at all; else these alone, texts or tokens.
    own: the model's ends of sequence.

    Example: ``["\\n\\n"]`` → ``((), ("\\n\\n",))``: an end of sequence does not end the sample then.
    """
    if stop is None:
        return tuple(own), ()
    given = [stop] if isinstance(stop, str) else stop
    if not isinstance(given, list) or len(given) > MOST:
        raise RequestError(f"stop must be a text, or a list of at most {MOST} texts or tokens")
    if all(type(part) is int for part in given):
        if outside := [token for token in given if not 0 <= token < vocab_size]:
            raise RequestError(f"stop holds token {outside[0]}, and the vocabulary has {vocab_size} tokens")
        return tuple(given), ()
    if all(isinstance(part, str) and part for part in given):
        return (), tuple(given)
    raise RequestError("stop must hold texts that are not empty, or tokens, not both")

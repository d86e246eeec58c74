"""The exceptions that megatron_rl raises on purpose. A message names what is wrong, its value and the way out."""

from __future__ import annotations


def quoted(value: object, most: int = 60) -> str:
    """Return a value's repr for a message, shortened to ``most`` characters; a text is escaped to ASCII."""
    return shortened(repr(value) if not isinstance(value, str) or value.isascii() else ascii(value), most)


def shortened(text: str, most: int = 60) -> str:
    """Return a text for a message, shortened to ``most`` characters, with its length added if it was longer."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def printable(text: str) -> str:
    """Return a text as one line of a log, with control characters and line breaks escaped."""
    return "".join(part if part.isprintable() else ascii(part)[1:-1] for part in text)


class ConfigError(ValueError):
    """Reports a setting that cannot work; the message names the key, the value and what to set in its place."""


class RunError(RuntimeError):
    """Reports an error that ends the run; the command line prints its message without a traceback, and exits with 1."""


class LockstepError(RunError):
    """Reports that ranks disagree on the next operation; the message names a rank that differs, and how.

    Raised on every rank.
    """


class NonFiniteGradient(RunError):
    """Reports that the global gradient norm is not finite, under ``optimizer.on_nonfinite=fail``.

    Raised on every rank.
    """


class NonFiniteAdvantage(RunError, ValueError):
    """Reports a NaN, an infinity or an overflow in a reward, an advantage or a number computed between them.

    The message names the sample and the settings to look at. Raised on every rank, because all
    ranks compute advantages from the same numbers.
    """


class RewardError(RunError):
    """Reports a reward function that failed on a sample; the message carries the sample's id and the traceback."""


class EpisodeError(RunError):
    """Reports an environment that failed or took too long; the message carries sample id, turn and traceback."""


class CheckpointError(RunError):
    """Reports a checkpoint that is damaged, unwritable, or of another model or format; the message names the file."""


class StoreError(OSError, RunError):
    """Reports an object store's error answer, or that no answer came; the message carries the URL."""


class PeerError(RunError):
    """Reports that another rank stopped; the message carries its rank and its error."""


class EngineError(RunError):
    """Reports that an inference engine failed, or gave an answer that cannot be right; the message names the fault."""


class NoSignalError(RunError):
    """Reports that groups without a gradient are left after dynamic sampling has replaced groups as often as it may.

    Raised under ``rollout.dynamic_sampling.on_exhausted=fail``.
    """

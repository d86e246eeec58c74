"""The check of a setting that is one of a few words; it raises a ConfigError that names key and value."""

from __future__ import annotations

from megatron_rl.config.import_path import is_own
from megatron_rl.errors import ConfigError, quoted


def choose(key: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}={quoted(value)} is not known; choose one of {', '.join(allowed)}")


def choose_or_own(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Take a word, or ``module:function``, which is looked up at the run's start."""
    if not is_own(value):
        choose(key, value, (*allowed, "your own module:function"))

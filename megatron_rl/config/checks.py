"""The check of a setting that is one of a few words; it raises a ConfigError that names key and value."""

from __future__ import annotations

from megatron_rl.config.json_text import quoted
from megatron_rl.errors import ConfigError


def choose(key: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}={quoted(value)} is not known; choose one of {', '.join(allowed)}")

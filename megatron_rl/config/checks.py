"""The two checks that nearly every setting needs; each raises a ConfigError that names key and value."""

from __future__ import annotations

from megatron_rl.errors import ConfigError


def choose(key: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}={value!r} is not known; choose one of {', '.join(allowed)}")


def at_least(key: str, value: float | None, low: float, *, exclusive: bool = False) -> None:
    if value is not None and (value < low or (exclusive and value == low)):
        raise ConfigError(f"{key}={value} must be {'above' if exclusive else 'at least'} {low}")

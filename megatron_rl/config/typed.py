"""Functions that convert plain values, as from YAML, to the types of a section's fields, and check keys and ranges."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Mapping

from megatron_rl.config.checks import Range, check_number, hints_of, parts_of
from megatron_rl.errors import ConfigError, quoted, shortened

_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", dict: "keys with values"}


def fitted(cls: type, values: Mapping[str, object], key: str = "", root: type | None = None) -> dict[str, object]:
    """Return {key: value} of a section, with each value converted to the type of its field.

    cls: the section's class, a dataclass of megatron_rl/config.
    values: {key: plain value}; keys may be missing.
    key: the section's own key, for messages; empty for the whole configuration.
    root: the class of the whole configuration; None: ``cls``.

    Raises ConfigError for a key that the section lacks, and for a value of another type or beyond
    its range.
    """
    hints, prefix, root = hints_of(cls), f"{key}." * bool(key), root or cls
    typed: dict[str, object] = {}
    for name, value in values.items():
        check_known(cls, name, value, prefix, root)
        if not dataclasses.is_dataclass(hints[name]):
            typed[name] = typed_value(f"{prefix}{name}", value, hints[name])
        elif isinstance(value, dict):
            typed[name] = fitted(hints[name], value, f"{prefix}{name}", root)
        else:
            raise ConfigError(
                f"{prefix}{name}={_written(value)} must be a section with keys, as in "
                f"{prefix}{name}.{dataclasses.fields(hints[name])[0].name}"
            )
    return typed


def escaped(value: object) -> object:
    """Return a value with every ``${`` in its texts escaped, so that OmegaConf reads no interpolation there."""
    if isinstance(value, dict):
        return {name: escaped(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(escaped(part) for part in value)
    if isinstance(value, str) and "${" in value:
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    return value


def build_section(cls: type, values: Mapping[str, object]):
    """Return an instance of the section ``cls`` with the given values, and defaults for its other fields.

    values: {key: value}, with values of the fields' types.
    """
    built = {}
    for name, value in values.items():
        hint = hints_of(cls)[name]
        if dataclasses.is_dataclass(hint):
            built[name] = build_section(hint, value)
        else:
            built[name] = tuple(value) if typing.get_origin(hint) is tuple else value
    return cls(**built)


def check_known(cls: type, name: str, value: object, prefix: str, root: type) -> None:
    """Raise ConfigError if the section ``cls`` has no key ``name``; the message gives the renamed or the nearest key.

    value: the key's value, for the message.
    prefix: the section's own key with a final dot; empty for the whole configuration.
    root: the class of the whole configuration.
    """
    if name in hints_of(cls):
        return
    from megatron_rl.config.known_names import RENAMED
    from megatron_rl.config.nearest import advice, leaf_of

    if f"{prefix}{name}" in RENAMED:
        raise ConfigError(
            f"config key {prefix}{name} (value {quoted(value)}) is called {RENAMED[f'{prefix}{name}']} now; rename it"
        )
    key, held = leaf_of(f"{prefix}{name}", value)
    raise ConfigError(f"unknown config key {shortened(key)} (value {quoted(held)}); {advice(root, cls, key, prefix)}")


def hint_at(cls: type, key: str) -> object | None:
    """Return the type of the field at a dotted key; None if no field or a whole section is there."""
    name, _, rest = key.partition(".")
    hint = hints_of(cls).get(name)
    if rest:
        return hint_at(hint, rest) if dataclasses.is_dataclass(hint) else None
    return None if dataclasses.is_dataclass(hint) else hint


def holds_text(hint: object) -> bool:
    """Return whether a field's type is a text or a list of texts.

    On the command line such a field may be set to any text, without YAML's quotes.
    """
    return hint in (str, str | None, tuple[str, ...])


def typed_value(key: str, value: object, hint: object) -> object:
    """Return a plain value converted to the type of its field.

    For a field of a list, a single value becomes a list of one. For a field of an integer, ``1e3``
    becomes 1000.

    key: the field's key, for messages.
    hint: the field's type, with its range.

    Raises ConfigError for a value of another type, or beyond its range.
    """
    # Null, and the placeholder of OmegaConf.
    if isinstance(value, str) and value == "???":
        raise ConfigError(f"{key}=??? is a placeholder; give a value")
    may_be_null = type(None) in typing.get_args(hint)
    if may_be_null:
        if value is None:
            return None
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is tuple:
        return _tuple(key, value, arguments)
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{key}={_written(value)} must be keys with values, as in {{name: value}}")
        return {
            name: part if arguments[1] is typing.Any else typed_value(f"{key}.{name}", part, arguments[1])
            for name, part in value.items()
        }
    kind, bounds = next(parts_of(hint))
    return _scalar(key, value, kind, bounds, may_be_null)


def _tuple(key: str, value: object, arguments: tuple) -> tuple:
    if isinstance(value, str) and not value.strip():
        value = []
    if value is None or isinstance(value, dict):
        raise ConfigError(f"{key}={_written(value)} must be a list, as in [a, b]; [] is the empty one")
    parts = value if isinstance(value, list) else [value]
    hints = [arguments[0]] * len(parts) if arguments[-1] is ... else arguments
    if len(parts) != len(hints):
        raise ConfigError(f"{key}={quoted(value)} must be a list of {len(hints)} values, and it has {len(parts)}")
    return tuple(typed_value(key, part, hint) for part, hint in zip(parts, hints, strict=True))


def _scalar(key: str, value: object, kind: type, bounds: Range | None, may_be_null: bool) -> object:
    converted = _converted(value, kind)
    if converted is None:
        numbers = f", {bounds.words}" if bounds is not None else ""
        quotes = "; put quotes around it" if kind is str and isinstance(value, bool) else ""
        raise ConfigError(f"{key}={_written(value)} must be {_WORDS[kind]}{numbers}{', or null' * may_be_null}{quotes}")
    if bounds is not None:
        check_number(key, converted, bounds, or_null=may_be_null)
    return float(converted) if kind is float else converted


def _written(value: object) -> str:
    return {"None": "null", "True": "true", "False": "false"}.get(repr(value)[:60], quoted(value))


def _converted(value: object, kind: type) -> object | None:
    """Return a value converted to ``kind``; None if it cannot be."""
    if kind is str:
        return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    if kind is bool:
        if isinstance(value, str):
            return _FLAGS.get(value.strip().lower())
        return bool(value) if isinstance(value, bool | int) and value in (0, 1) else None
    if isinstance(value, str) and len(value) < 400:  # as from an environment variable, or in quotes
        try:
            value = int(value) if kind is int and value.strip().lstrip("+-").isdigit() else float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if kind is int and isinstance(value, float):
        return int(value) if math.isfinite(value) and value.is_integer() else None
    return value

"""The reader of another framework's YAML; a file that is too large or too deeply nested is refused."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.commands.translate.kinds import Kind, kind_of_names
from megatron_rl.commands.translate.translation import flat, number
from megatron_rl.config.yaml_text import parse_yaml, read_yaml

SUFFIXES = (".yaml", ".yml", ".json")
MOST_TEXT = 2**13  # the most characters of a value that refers to others
_REFERENCE = re.compile(r"\$\{(?:oc\.select:\s*)?([\w.]+)(?:,([^{}]*))?\}")
_MOST_PASSES = 5  # the most steps of a reference to a reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Holds the settings that were read from a file.

    kind: the framework and trainer that the file is for; None if that cannot be seen.
    given: {name: value}.
    unknown: {name: reason} of settings whose value is not known, such as ``lr=$LR``.
    notes: sentences on parts of the file that were not read as settings.
    """

    kind: Kind | None
    given: Mapping[str, Any]
    unknown: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


def of_yaml(path: pathlib.Path) -> Settings:
    """Return the settings of a YAML file. Raises ConfigError if it cannot be read."""
    values = followed(flat(read_yaml(path)[0]))
    refers = {k: f"{v!r} refers to another setting" for k, v in values.items() if isinstance(v, str) and "${" in v}
    given = {name: value for name, value in values.items() if name not in refers}
    return Settings(kind=kind_of_names(values), given=given, unknown=refers)


def followed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which Hydra's references ``${name}`` are replaced by the values of those settings.

    A reference to a setting that is absent stays as it is.
    """
    values = dict(settings)
    for _ in range(_MOST_PASSES):
        for name, value in values.items():
            if not isinstance(value, str) or "${" not in value:
                continue
            whole_value = _REFERENCE.fullmatch(value)
            if whole_value:
                values[name] = _referred(whole_value, values)
            else:
                text = _REFERENCE.sub(lambda match: str(_referred(match, values)), value)
                values[name] = text if len(text) <= MOST_TEXT else value
    return values


def _referred(match: re.Match[str], settings: Mapping[str, Any]) -> Any:
    name, default = match[1], match[2]
    value = settings.get(name, match[0] if default is None else parsed(default.strip()))
    return match[0] if isinstance(value, str) and "${" in value else value


def parsed(text: str) -> Any:
    """Return the value that Hydra reads from a text: a number, a list, a bool, None or the text itself."""
    if text.startswith("["):
        try:
            return list(ast.literal_eval(text))
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two for many brackets
            return [part.strip(" '\"") for part in text.strip("[]").split(",")]
    try:
        value = parse_yaml(text, "a word")
        return number(value) if isinstance(value, str) or (isinstance(value, float) and "e" in text.lower()) else value
    except ValueError:  # no number; the ConfigError for invalid YAML is a ValueError too
        return text

"""The result of a translation: our settings, and what of theirs has no place among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from megatron_rl.errors import ConfigError, quoted


@dataclass(slots=True, kw_only=True)
class Translation:
    """Collects a configuration key by key.

    given:   their settings, name → value: those that the user wrote.
    assumed: their defaults for settings that the user did not write and that differ from ours.
    ours:    our settings, ``section.key`` → value.
    left:    their name → why it is not translated.
    needless: their names whose work is done here without a setting.
    """

    given: Mapping[str, Any]
    assumed: Mapping[str, Any]
    ours: dict[str, Any] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    needless: list[str] = field(default_factory=list)
    _read: set[str] = field(default_factory=set)

    def get(self, name: str) -> Any:
        """Return their value, written or assumed, and count the setting as read; None where it is neither."""
        self._read.add(name)
        return self.given.get(name, self.assumed.get(name))

    def take(self, name: str, key: str, convert: Callable[[Any], Any] = lambda value: value) -> None:
        """Set ``key`` to their value, where they have one. A ValueError of ``convert`` leaves it, with its message."""
        value = self.get(name)
        if value is None:
            return
        try:
            self.ours[key] = convert(value)
        except ValueError as error:
            self.left[name] = f"{value!r}: {error}"

    def choose(self, name: str, choices: Mapping[object, Mapping[str, Any]], why: str) -> None:
        """Set the keys that their value stands for; leave it, with ``why``, where it stands for none."""
        value = self.get(name)
        if value is None:
            return
        if value in choices:
            self.ours |= choices[value]
        else:
            self.left[name] = f"{value!r}: {why}"

    def leave(self, name: str, why: str) -> None:
        """Note why a setting that the user wrote is not translated."""
        if name in self.given:
            self._read.add(name)
            self.left[name] = why

    def skip(self, *names: str) -> None:
        """Count settings as needless here; a name that ends with "." stands for all below it."""
        for name in self.given:
            if name not in self._read and any(
                name == each or (each.endswith(".") and name.startswith(each)) for each in names
            ):
                self._read.add(name)
                self.needless.append(name)

    def close(self) -> None:
        """Note each written setting that no rule has read."""
        for name in self.given:
            if name not in self._read:
                self.left[name] = "no rule is known for it"


def number(value: Any) -> float | int:
    """Return a number that may be written as a text. Raises ValueError for another value."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("it is no number")
    if isinstance(value, str):
        value = float(value)
    return int(value) if float(value).is_integer() and abs(value) >= 1 else value


def whole(value: Any) -> int:
    """Return a whole number that may be written as a text or a float. Raises ValueError for another value."""
    found = number(value)
    if not float(found).is_integer():
        raise ValueError("it is no whole number")
    return int(found)


def truth(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise ValueError("it is neither true nor false")
    return value


def paths(value: Any) -> list[str]:
    return [str(each) for each in (value if isinstance(value, list) else [value])]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one with dotted names. Raises ConfigError for a name that is no text of one line."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(name, str) or not name.isprintable():
            raise ConfigError(f"the settings hold the name {quoted(name)}, which is no text of one line")
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def as_yaml(translation: Translation, source: str, framework: str) -> str:
    """Return our YAML, with the settings that are left and the needless ones as comments above it."""
    sections: dict[str, Any] = {}
    for key, value in sorted(translation.ours.items()):
        *path, last = key.split(".")
        section = sections
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    lines = [
        f"# Translated from {framework}'s {source}. docs/coming-from.md says what each setting means there and here."
    ]
    if translation.left:
        left = (" ".join(f"{name}: {why}".splitlines()) for name, why in sorted(translation.left.items()))
        lines += ["#", "# NOT translated:", *(f"#   {each}" for each in left)]
    if translation.needless:
        lines += ["#", "# Needs no setting here:", *_wrapped(sorted(translation.needless))]
    text = yaml.safe_dump(sections, sort_keys=True, default_flow_style=False, allow_unicode=True, width=120)
    return "\n".join(lines) + "\n" + text


def _wrapped(names: Sequence[str], width: int = 116) -> list[str]:
    lines = ["#  "]
    for name in names:
        if len(lines[-1]) + len(name) + 2 > width:
            lines.append("#  ")
        lines[-1] += f" {name}"
    return lines

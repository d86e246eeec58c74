"""The result of a translation: our settings, and the other framework's settings that were not translated."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.errors import ConfigError, quoted

MISSING = "???"  # stands for a value that the user has to fill in; no field accepts it
FREE_NAMES = ("rollout.vllm.", "megatron.", "data.template_variables.", "critic.optimizer.", "critic.parallel.")


@dataclass(slots=True, kw_only=True)
class Translation:
    """Collects a translated configuration. "Their" means the other framework's, "our" means megatron_rl's.

    framework: the other framework's name.
    given:   {their name: value} of the settings that the user wrote.
    assumed: {their name: default} of settings that the user did not write, if the default differs
        from ours.
    unknown: {their name: reason} of settings that the user wrote and whose value the file does not
        tell, such as ``lr=$LR``.
    ours:    {our ``section.key``: value}.
    open:    {our key: reason} of keys that the user has to fill in. In ``ours`` they have the value
        ``???``, with which the configuration does not load.
    left:    {their name: reason} of settings that are not translated.
    needless: their names of settings that need no translation: ours behaves that way anyway.
    """

    framework: str
    given: Mapping[str, Any]
    assumed: Mapping[str, Any]
    unknown: Mapping[str, str] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    needless: list[str] = field(default_factory=list)
    _read: set[str] = field(default_factory=set)

    def get(self, name: str) -> Any:
        """Return the user's value of the other framework's setting ``name``, else its ``assumed`` default, else None.

        The setting counts as read from now on. If the user wrote a value that the file does not tell
        (``unknown``), the ``assumed`` default is returned, and ``left`` gets a note.
        """
        self._read.add(name)
        if name in self.unknown:
            self.left[name] = f"{self.unknown[name]}; read as their default, {self.assumed.get(name)}"
        return self.given.get(name, self.assumed.get(name))

    def is_given(self, name: str) -> bool:
        return name in self.given or name in self.unknown

    def under(self, prefix: str) -> list[str]:
        """Return the names, among the settings that the user wrote, that begin with ``prefix``."""
        return [name for name in (*self.given, *self.unknown) if name.startswith(prefix)]

    def need(self, key: str, why: str) -> None:
        """Mark our ``key`` as one that the user has to fill in, for the reason ``why``.

        The key gets the value ``???``, which stops a run. A key that takes any value, such as one of
        ``rollout.vllm``, would not stop it, and is noted in ``left`` instead.
        """
        if key.startswith(FREE_NAMES):
            self.left[key] = why
            return
        self.ours[key] = MISSING
        self.open[key] = why

    def take(self, name: str, key: str, convert: Callable[[Any], Any] = lambda value: value) -> None:
        """Set our ``key`` to the value of the other framework's setting ``name``, if that setting has a value.

        convert: a function of the value. If it raises ValueError, the user has to fill in the key.
        """
        self.compute(key, (name,), convert)

    def compute(self, key: str, names: Sequence[str], function: Callable[..., Any]) -> None:
        """Set our ``key`` to the result of ``function`` for the values of the other framework's settings ``names``.

        Nothing is set if a setting is not written and has no ``assumed`` default. If one is
        ``unknown``, or ``function`` raises ValueError or TypeError, the user has to fill in the key.
        """
        self._read |= set(names)
        for name in names:
            if name in self.unknown:
                self.need(key, f"{name}={self.unknown[name]}")
                return
        values = [self.get(name) for name in names]
        if any(value is None for value in values):
            return
        try:
            self.ours[key] = function(*values)
            self.open.pop(key, None)
        except (ValueError, TypeError) as error:
            written = ", ".join(f"{name}={quoted(value)}" for name, value in zip(names, values, strict=True))
            self.need(key, f"{written}: {error}")

    def choose(self, name: str, choices: Mapping[object, Mapping[str, Any]], why: str) -> None:
        """Set our keys according to the value of the other framework's setting ``name``.

        choices: {value of that setting: {our key: value}}.
        why: the reason noted for any other value; the user then has to fill in the keys.
        """
        self._read.add(name)
        keys = dict.fromkeys(key for settings in choices.values() for key in settings)
        if name in self.unknown:
            for key in keys:
                self.need(key, f"{name}={self.unknown[name]}")
            return
        value = self.get(name)
        if value is None:
            return
        if isinstance(value, Hashable) and value in choices:
            self.ours |= choices[value]
        elif keys:
            for key in keys:
                self.need(key, f"{name}={quoted(value)}: {why}")
        else:
            self.left[name] = f"{quoted(value)}: {why}"

    def leave(self, name: str, why: str) -> None:
        """Note in ``left`` why the other framework's setting ``name`` is not translated, if the user wrote it."""
        if self.is_given(name) and name not in self.needless:
            self._read.add(name)
            self.left[name] = f"{quoted(self.given[name], 80)}: {why}" if name in self.given else why

    def skip(self, *names: str) -> None:
        """Add settings of the other framework to ``needless``, if the user wrote them and no rule has read them yet.

        names: the settings' names; one that ends with "." stands for all names that begin with it.
        """
        for name in (*self.given, *self.unknown):
            if name not in self._read and any(
                name == each or (each.endswith(".") and name.startswith(each)) for each in names
            ):
                self._read.add(name)
                self.needless.append(name)

    def close(self) -> None:
        """Note in ``left`` each setting that the user wrote and that no rule has read."""
        for name, value in self.given.items():
            if name.endswith("._target_"):
                self.needless.append(name)
            elif name not in self._read:
                self.left[name] = f"{quoted(value, 80)}: no rule is known for it"
        for name, depends in self.unknown.items():
            if name not in self._read:
                self.left[name] = depends


def number(value: Any) -> float | int:
    """Return ``value``, a number or the text of one, as an int or float. Raises ValueError for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("it is no number")
    if isinstance(value, str):
        value = float(value)
    return int(value) if float(value).is_integer() and abs(value) >= 1 else value


def whole(value: Any) -> int:
    """Return ``value``, a whole number or the text of one, as an int. Raises ValueError for any other value."""
    as_number = number(value)
    if not float(as_number).is_integer():
        raise ValueError("it is no whole number")
    return int(as_number)


def truth(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise ValueError("it is neither true nor false")
    return value


def paths(value: Any) -> list[str]:
    return [str(each) for each in (value if isinstance(value, list) else [value])]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one dict with dotted names: {"a": {"b": 1}} becomes {"a.b": 1}.

    prefix: a text put before every name.

    Raises ConfigError for a name that is not one line of text.
    """
    dotted: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(name, str) or not name.isprintable():
            raise ConfigError(f"the settings hold the name {quoted(name)}, which is no text of one line")
        if isinstance(value, Mapping) and value:
            dotted |= flat(value, f"{prefix}{name}.")
        else:
            dotted[prefix + name] = value
    return dotted

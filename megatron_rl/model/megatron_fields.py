"""The conversion of a user's ``megatron.{transformer,ddp,optimizer}.*`` to values of Megatron-Core's classes.

Every field of the installed Megatron-Core is accepted, except fields that this package sets itself
and fields of features that cannot work here. Each refusal gives its reason. YAML has no dtypes and
no enums, so the field's declared type decides: "bfloat16" becomes torch.bfloat16, and a name
becomes an enum's member. A value of another type is refused. But if a field's type does not include
None, null leaves the field at its default.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any

import torch

from megatron_rl.errors import ConfigError, quoted

OFF = (None, False, 0, "", "none")  # values that leave a feature of Megatron-Core off; so do empty lists


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """Holds the fields of one configuration class that a user may not set, each with the reason.

    owned: fields that this package or another setting decides; no value is accepted.
    unsupported: fields of features that do not work here. Only Megatron-Core's default, and values
        that leave the feature off, are accepted.
    """

    owned: Mapping[str, str]
    unsupported: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, config: type, *, owned: Mapping[str, str], unsupported: Mapping[str, str]) -> Refusals:
        """Return the refusals ``owned`` and ``unsupported``, without the fields that the class ``config`` lacks.

        Each maps a field to the reason (see the class). Megatron-Core's releases (0.16.1, 0.19.2)
        have different fields.
        """
        known = {field.name for field in dataclasses.fields(config)}
        owned, unsupported = ({x: why for x, why in part.items() if x in known} for part in (owned, unsupported))
        return cls(owned=owned, unsupported=unsupported)

    def refuse(self, name: str, value: Any, section: str, default: Any) -> None:
        """Raise ConfigError if the field ``name`` may not have the value ``value``.

        section: the setting that holds the field, for the message.
        default: Megatron-Core's default of the field.
        """
        off = value in OFF or value in ([], (), default)
        reason = self.owned.get(name) or ("" if off else self.unsupported.get(name))
        if reason:
            raise ConfigError(f"{section}.{name}={quoted(value)} is refused: {reason}; remove it")


def resolve_fields(users: Mapping[str, Any], cls: type, section: str, refusals: Refusals) -> dict[str, Any]:
    """Return the user's fields with their values converted to the types that ``cls`` declares.

    users: the user's fields and values.
    cls: a configuration class of the installed Megatron-Core.
    section: the setting that holds ``users``, for messages.
    refusals: the fields that may not be set.

    Raises ConfigError for an unknown field, a refused field, and a value of a wrong type.
    """
    known = {f.name: f.default for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    resolved = {}
    for name, value in users.items():
        refusals.refuse(name, value, section, known.get(name))
        if name not in known:
            nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"unknown field {section}.{name} (value {quoted(value)}); the nearest field of {cls.__name__} is "
                f"{nearest}"
            )
        read = [None] if value is known[name] is None else _read(value, hints[name])
        if not read and value is not None:
            raise ConfigError(
                f"{section}.{name}={quoted(value)} is not a value of this field, which takes "
                f"{' or '.join(dict.fromkeys(_words(hints[name])))}; change it, or remove it"
            )
        resolved.update(zip([name], read, strict=False))
    return resolved


def _read(value: Any, hint: Any) -> list[Any]:
    """Return [``value`` converted to the type ``hint``], or [] if the type has no such value."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return next((found for part in parts if (found := _read(value, part))), [])
    if origin is typing.Literal:
        return [value] if value in parts else []
    if list in (origin, hint) or origin is tuple:
        if not isinstance(value, list | tuple) or (origin is tuple and ... not in parts and len(parts) != len(value)):
            return []
        every = [_read(x, [*parts, typing.Any][0]) for x in value]
        return [(origin or hint)(x for (x,) in every)] if all(every) else []
    if isinstance(hint, enum.EnumType):
        value = hint.__members__.get(value, value) if isinstance(value, str) else value
    elif hint is torch.dtype and isinstance(value, str):
        value = vars(torch).get(value.removeprefix("torch."))
    elif hint is bool and type(value) is int and value in (0, 1):
        value = bool(value)
    wanted = {float: float | int, typing.Any: object}.get(hint, origin or hint)
    return [value] if isinstance(value, wanted) and (hint in (bool, typing.Any) or not isinstance(value, bool)) else []


def _words(hint: Any) -> list[str]:
    """Return descriptions of the values that a type hint admits, for an error message."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return [word for part in parts for word in _words(part)]
    if origin is typing.Literal:
        return [str(part) for part in parts]
    if list in (origin, hint) or origin is tuple:
        return [" of ".join(["a list", *(" or ".join(_words(part)) for part in parts[:1])])]
    if isinstance(hint, enum.EnumType):
        return list(hint.__members__)
    known = {bool: "true or false", int: "an integer", float: "a number", str: "a text", type(None): "null"}
    known[torch.dtype] = "a torch dtype (bfloat16, float32, float8_e4m3fn)"
    return [known.get(hint, "a Python object, which no setting names")]

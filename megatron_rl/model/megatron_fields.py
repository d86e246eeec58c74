"""``megatron.{transformer,ddp,optimizer}.*``: a user's fields → values of the installed Megatron-Core's config classes.

Every field of the installed version is accepted, but those that the seam owns and those of features that cannot work
here, each refused with its reason. YAML has
no dtypes and no enums: "bfloat16" becomes torch.bfloat16 and an enum's name its member where the field's type asks for
one.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import typing
from collections.abc import Mapping
from typing import Any

import torch

from megatron_rl.errors import ConfigError, quoted

OFF = (None, False, 0, "", "none")  # and empty lists: values that leave a feature of Megatron-Core off


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """Holds the fields of one class that may not be set, each with its reason.

    owned:       fields that the seam or another key sets; no value is accepted.
    unsupported: features that do not work here; only the values that leave them off, and Megatron-Core's own, are
                 accepted.
    """

    owned: Mapping[str, str]
    unsupported: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def refuse(self, name: str, value: Any, section: str, default: Any) -> None:
        """Raise ConfigError where the field may not have this value. default: Megatron-Core's own."""
        off = value in OFF or value in ([], (), default)
        reason = self.owned.get(name) or ("" if off else self.unsupported.get(name))
        if reason:
            raise ConfigError(f"{section}.{name}={quoted(value)} is refused: {reason}; remove it")


def resolve_fields(given: Mapping[str, Any], cls: type, section: str, refusals: Refusals) -> dict[str, Any]:
    """Return the fields with values of the types that ``cls`` wants.

    given: the user's fields and values.
    cls: a configuration class of the installed Megatron-Core.
    section: the key of ``given``, for messages.
    Raises ConfigError for a field that ``cls`` lacks, that is refused, or whose value has no meaning.
    """
    known = {f.name: f.default for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    resolved = {}
    for name, value in given.items():
        refusals.refuse(name, value, section, known.get(name))
        if name not in known:
            nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"unknown field {section}.{name} (value {quoted(value)}); the nearest field of {cls.__name__} is "
                f"{nearest}"
            )
        resolved[name] = _typed(value, hints[name], f"{section}.{name}")
    return resolved


def _typed(value: Any, hint: Any, key: str) -> Any:
    """Return the dtype or enum member that a string names, if the type hint asks for one, else the value unchanged."""
    kinds = _members(hint)
    if not isinstance(value, str) or str in kinds:
        return value
    if torch.dtype in kinds:
        dtype = vars(torch).get(value.removeprefix("torch."))
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(
                f"{key}={quoted(value)} names no torch dtype; use one as in bfloat16, float32, float8_e4m3fn"
            )
        return dtype
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            if value not in kind.__members__:
                raise ConfigError(
                    f"{key}={quoted(value)} is no {kind.__name__}; choose one of {', '.join(kind.__members__)}"
                )
            return kind[value]
    return value


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the types that a hint admits: the parts of a Union or an Optional, or the hint itself."""
    parts = typing.get_args(hint)
    return tuple(x for part in parts for x in _members(part)) if parts else (hint,)

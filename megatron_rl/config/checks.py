"""Checks of single settings: that a word is one of those allowed, and a number in the range of its field's type.

A field's type states its range:

    tensor: Annotated[int, Range(1, 10**5)] = 1

No range holds NaN, and none holds infinity, since each has an upper end. The upper end is the
largest number that a user can mean, so that a typing error is found at the start.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Iterator

from megatron_rl.errors import ConfigError, quoted
from megatron_rl.users_code import is_own


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Holds the bounds of a number, ``low`` and ``high``; ``open_low`` or ``open_high`` excludes the bound itself."""

    low: float
    high: float = 10**9
    open_low: bool = dataclasses.field(default=False, kw_only=True)
    open_high: bool = dataclasses.field(default=False, kw_only=True)

    def __contains__(self, number: float) -> bool:
        above = number > self.low if self.open_low else number >= self.low
        return above and (number < self.high if self.open_high else number <= self.high)

    @property
    def words(self) -> str:
        """Return the range as a message words it: ``at least 1 and at most 1000``."""
        low, high = ("above" if self.open_low else "at least"), ("below" if self.open_high else "at most")
        return f"{low} {_short(self.low)} and {high} {_short(self.high)}"

    @property
    def cell(self) -> str:
        """Return the range as a table's cell words it: ``1 to 1000``, ``above 0 to 1``."""
        low, high = "above " * self.open_low, "below " * self.open_high
        return f"{low}{_short(self.low)} to {high}{_short(self.high)}"


def _short(number: float) -> str:
    text = f"{number:.0e}" if number and abs(number) >= 10**5 else f"{number:g}"
    return re.sub(r"e\+?(-?)0?", r"e\1", text) if float(text) == number else str(number)


@functools.cache
def hints_of(section: type) -> dict[str, object]:
    """Return {field name: type} of a section's class, with the ``Annotated`` ranges kept."""
    return typing.get_type_hints(section, include_extras=True)


def parts_of(hint: object) -> Iterator[tuple[object, Range | None]]:
    """Yield (type, range) for each innermost type of a type hint; the range is None if the type has none.

    Example: ``tuple[Annotated[int, Range(1)], ...] | None`` gives (int, Range(1)), (Ellipsis,
    None), (NoneType, None).
    """
    if typing.get_origin(hint) is typing.Annotated:
        ranges = [extra for extra in hint.__metadata__ if isinstance(extra, Range)]
        yield hint.__origin__, ranges[0] if ranges else None
    elif arguments := typing.get_args(hint):
        for part in arguments:
            yield from parts_of(part)
    else:
        yield hint, None


def range_of(hint: object) -> Range | None:
    """Return the first range within a field's type hint; None if it has no range."""
    return next((bounds for _, bounds in parts_of(hint) if bounds is not None), None)


def check_ranges(section: object, key: str = "") -> None:
    """Raise ConfigError if a number of a section, or of a section within it, is outside the range of its field.

    section: an instance of a dataclass of megatron_rl/config.
    key: the section's own key, for messages; empty for the whole configuration.
    """
    for field in dataclasses.fields(section):
        name = f"{key}.{field.name}".lstrip(".")
        value, hint = vars(section)[field.name], hints_of(type(section))[field.name]
        if dataclasses.is_dataclass(value):
            check_ranges(value, name)
        elif (bounds := range_of(hint)) is not None and value is not None:
            for number in value if isinstance(value, tuple | list) else (value,):
                check_number(name, number, bounds, or_null=type(None) in dict(parts_of(hint)))


def check_number(key: str, number: object, bounds: Range, *, or_null: bool = False) -> None:
    """Raise ConfigError if a value is no number, or is outside ``bounds``; true and false are no numbers.

    key: the setting, for the message.
    or_null: whether the message offers null as another value.
    """
    way_out = f"{bounds.words}{', or null' * or_null}"
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ConfigError(f"{key}={quoted(number)} must be a number, {way_out}")
    if number not in bounds:
        raise ConfigError(f"{key}={quoted(number)} must be {way_out}")


def choose(key: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError if the value of the setting ``key`` is none of the allowed words."""
    if value not in allowed:
        raise ConfigError(f"{key}={quoted(value)} is not known; choose one of {', '.join(allowed)}")


def choose_or_own(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError if a value is neither an allowed word nor of the form ``module:function``.

    Whether a ``module:function`` exists is not checked here, but at the run's start.
    """
    if not is_own(value):
        choose(key, value, (*allowed, "your own module:function"))

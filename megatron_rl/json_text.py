"""A strict reader of JSON from outside this program: an error is one sentence with file and field.

It refuses text that is not UTF-8 or not JSON. It refuses NaN, infinity (``1e999`` too), numbers of
more than MOST_DIGITS digits, half a surrogate pair, and an object in which a key occurs twice. It
refuses more than MOST_LEVELS levels of brackets. The memory that it takes is bounded.
"""

from __future__ import annotations

import errno
import json
import math
import os
import pathlib
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, BinaryIO

from megatron_rl.errors import ConfigError, quoted, shortened

if TYPE_CHECKING:
    from megatron_rl.storage.remote import RemotePath

MOST_BYTES = 256 * 2**20  # the largest tokenizer.json of a public model takes about 40 MB
MOST_DIGITS = 400  # the largest float64 has 309 digits before its point
MOST_LEVELS = 100  # of nested lists and objects
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_KINDS = {dict: "an object", list: "a list", str: "a text", int: "an integer", float: "a number", bool: "true or false"}


def parse_json(text: str | bytes, where: str, *, error: type[Exception] = ConfigError) -> object:
    """Return the value of a JSON text; bytes are UTF-8, with or without a byte order mark.

    where: the file, with the line if the text is one line of it; every message begins with it.
    error: the class to raise for a text that is refused (see the module).
    """

    # Hooks that refuse within json, then checks of the whole value.
    def refuse(reason: str) -> None:
        raise _Refused(reason)

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) < len(pairs):
            double = first_double(name for name, _ in pairs)
            refuse(f"the key {quoted(double)} stands twice in one object; keep one of the two")
        return values

    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        value = json.loads(
            text,
            object_pairs_hook=once,
            parse_constant=lambda name: refuse(f"{name} is no JSON number"),
            parse_int=lambda digits: _number(digits, int, refuse),
            parse_float=lambda digits: _number(digits, float, refuse),
        )
        if text.count("[") + text.count("{") > MOST_LEVELS and levels(value) > MOST_LEVELS:
            refuse(f"brackets are nested deeper than {MOST_LEVELS} levels")
        if _SURROGATE.search(text):
            for place, part in walk(value):
                if isinstance(part, str) and re.search("[\ud800-\udfff]", part):
                    refuse(f"{place or 'the text'} holds half a surrogate pair ({quoted(part)}), which is no character")
        return value
    except UnicodeDecodeError as fault:
        reason = f"not UTF-8 (byte {fault.start + 1}); save it as UTF-8"
    except json.JSONDecodeError as fault:
        line = f"line {fault.lineno}, " if fault.lineno > 1 else ""
        reason = f"not valid JSON: {fault.msg} ({line}column {fault.colno})"
    except RecursionError:
        reason = f"not read: brackets are nested deeper than {MOST_LEVELS} levels"
    except _Refused as fault:
        reason = str(fault)
    raise error(f"{where}: {reason}")


def first_double(names: Iterable[str]) -> str | None:
    """Return the first name that repeats an earlier one; None if all names differ."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


class _Refused(Exception):
    """Carries the reason why a text is refused; hooks of ``json.loads`` raise it, and ``parse_json`` catches it."""


def _number(digits: str, kind: type, refuse: Callable[[str], None]) -> int | float:
    if len(digits) > MOST_DIGITS:
        refuse(f"the number {digits[:20]}… has {len(digits)} characters; {MOST_DIGITS} is the most that is read")
    value = kind(digits)
    if kind is float and math.isinf(value):
        refuse(f"the number {digits} is beyond float64")
    return value


def levels(value: object) -> int:
    """Return how deeply lists and objects are nested in a JSON value: 0 for a number, 2 for [[1], 2]."""
    level, count = [value], 0
    while level := [part for part in level if isinstance(part, (dict, list))]:
        level = [inner for part in level for inner in (part.values() if isinstance(part, dict) else part)]
        count += 1
    return count


def walk(value: object) -> Iterator[tuple[str, object]]:
    """Yield (path, x) for the JSON value itself, for every value within it and for every key.

    Example: {"a": [1]} gives ("", {...}), ("a", "a"), ("a", [1]) and ("a[0]", 1), in some order.
    """
    waiting = [("", value)]  # no recursion, which deep nesting could exhaust
    while waiting:
        at, part = waiting.pop()
        yield at, part
        if isinstance(part, dict):
            for name, inner in part.items():
                below = f"{at}.{quoted(name)[1:-1]}".lstrip(".")
                yield below, name
                waiting.append((below, inner))
        elif isinstance(part, list):
            waiting += [(f"{at}[{i}]", inner) for i, inner in enumerate(part)]


def read_json(
    path: str | pathlib.Path | RemotePath, *, most_bytes: int = MOST_BYTES, error: type[Exception] = ConfigError
) -> object:
    """Return the value of a JSON file.

    most_bytes: the size of the largest file that is read.
    error: the class to raise for a file that cannot be read or whose text is refused.
    """
    return parse_json(read_bytes(path, "a JSON file", most_bytes=most_bytes, error=error), str(path), error=error)


def _without_waiting(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK)


def open_regular(path: str | pathlib.Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for anything else; a pipe is refused without waiting for it."""
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 (the caller closes it)
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def read_bytes(path: str | pathlib.Path | RemotePath, wanted: str, *, most_bytes: int, error: type[Exception]) -> bytes:
    """Return the bytes of a regular file, or of an object in an object store.

    wanted: the kind of file, for messages, as in "a JSON file".
    most_bytes: the size of the largest file that is read.
    error: the class to raise if the file is missing, larger or not regular.

    A pipe is refused without waiting for it. Raises StoreError if an object store does not answer.
    """
    if not isinstance(path, str | pathlib.Path):
        return _read_object_bytes(path, most_bytes, error)
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            facts = os.fstat(file.fileno())
            is_regular = stat.S_ISREG(facts.st_mode)
            content = file.read(most_bytes + 1) if is_regular and facts.st_size <= most_bytes else b""
    except (OSError, ValueError) as fault:  # ValueError: a path with NUL in it
        reason = fault.strerror if isinstance(fault, OSError) else str(fault)
        place = f" (working directory {os.getcwd()})" * (isinstance(fault, FileNotFoundError) and str(path)[:1] != "/")
        raise error(f"{shortened(str(path), 300)} cannot be read: {reason}{place}") from None
    if not is_regular:
        raise error(f"{path} is no regular file; {wanted} is wanted")
    if (size := max(facts.st_size, len(content))) > most_bytes:
        raise error(f"{path} has {size} bytes; at most {most_bytes} are read")
    return content


def _read_object_bytes(path: RemotePath, most_bytes: int, error: type[Exception]) -> bytes:
    try:
        size = path.stat().st_size
        content = path.read_bytes() if size <= most_bytes else b""
    except FileNotFoundError as fault:
        raise error(f"{shortened(str(path), 300)} cannot be read: {fault.strerror}") from None
    if size > most_bytes:
        raise error(f"{path} has {size} bytes; at most {most_bytes} are read")
    return content


def read_object(
    path: str | pathlib.Path | RemotePath, *, most_bytes: int = MOST_BYTES, error: type[Exception] = ConfigError
) -> dict[str, object]:
    """Return the JSON object of a file as a dict. Raises ``error`` where ``read_json`` does, and if it is no object."""
    value = read_json(path, most_bytes=most_bytes, error=error)
    return check(value, str(path), dict, error=error)


def check(
    value: object,
    where: str,
    kind: type,
    *,
    least: float | None = None,
    most: float | None = None,
    error: type[Exception] = ConfigError,
):
    """Return ``value`` unchanged. Raises ``error`` if it is not of type ``kind``, or is outside ``least`` to ``most``.

    where: the file and the field, for the message.
    kind: dict, list, str, bool, int or float. float accepts an integer too; true and false are
        neither int nor float.
    least, most: the bounds of a number, both allowed; None: no bound.
    """
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (kind in (int, float) and isinstance(value, bool)):
        raise error(f"{where} must be {_KINDS[kind]}, and it is {quoted(value)}")
    if (least is not None and value < least) or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"at most {most}" if least is None else f"{least} to {most}"
        raise error(f"{where} must be {bounds}, and it is {quoted(value)}")
    return value


def field(
    values: Mapping[str, object],
    name: str,
    kind: type,
    where: str,
    *,
    least: float | None = None,
    most: float | None = None,
    error: type[Exception] = ConfigError,
):
    """Return the value of a JSON object's field. Raises ``error`` if the object lacks it, or as ``check`` does.

    where: the file of the object, for messages.
    kind, least, most: see ``check``.
    """
    if name not in values:
        raise error(f"{where} lacks the field {name}")
    return check(values[name], f"{where}: {name}", kind, least=least, most=most, error=error)

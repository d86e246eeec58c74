"""Checks every call against the signature that Transformer Engine has, and counts the calls."""

from __future__ import annotations

import collections
import functools
import inspect
import json
import os
import pathlib
from collections.abc import Callable

VERSION = os.environ.get("STAND_IN_TRANSFORMER_ENGINE", "2.20.2")
FACTS = json.loads(pathlib.Path(__file__).parent.with_name("signatures.json").read_text())[VERSION]
CALLS: collections.Counter[str] = collections.Counter()
"""How often each function was called since the last ``clear``."""

OFF = (None, False, 0, "no_bias")
"""Values that switch off what the stand-in does not have."""


class ContractError(TypeError):
    """Says what the real module would refuse, or would compute wrongly without a word."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise ContractError(f"Transformer Engine {VERSION}: {what}")


@functools.cache
def signature(name: str) -> inspect.Signature:
    """Return the real signature of ``name`` in signatures.json, without ``self``."""
    return inspect.signature(eval(f"lambda {FACTS['signatures'][name]['parameters']}: None"))


def contract(name: str) -> Callable[[Callable], Callable]:
    """Bind a call's arguments by the real signature, and hand them over by name; the function may refuse the unused."""

    def wrap(function: Callable) -> Callable:
        is_method = "." in name

        @functools.wraps(function)
        def checked(*args, **kwargs):
            owner, given = (args[:1], args[1:]) if is_method else ((), args)
            try:
                bound = signature(name).bind(*given, **kwargs).arguments
            except TypeError as error:
                raise ContractError(f"Transformer Engine {VERSION}, {name}: {error}") from None
            CALLS[name] += 1
            return function(*owner, **{**bound.pop("kwargs", {}), **bound})

        return checked

    return wrap


def refuse(name: str, unused: dict[str, object], harmless: tuple[str, ...] = ()) -> None:
    """Raise ContractError for an argument that would switch on what the stand-in does not compute."""
    for argument, value in unused.items():
        known = argument in harmless or any(value is x or (value == x and type(value) is type(x)) for x in OFF)
        require(known, f"{name}({argument}={value!r}) is beyond the stand-in")

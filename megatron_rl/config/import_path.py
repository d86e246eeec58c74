"""Objects that the configuration names by ``module:attribute``, or by a built-in name."""

from __future__ import annotations

import difflib
import importlib
import operator
from collections.abc import Collection, Mapping

from megatron_rl.errors import ConfigError


def resolve(name: str, built_in: Mapping[str, str], *, what: str, form: str, also: Collection[str] = ()) -> object:
    """Return the object behind a name of ``built_in``, or behind ``module:attribute`` itself.

    name: a built-in's name, or ``module:attribute``.
    built_in: ``module:attribute`` by name.
    what: the setting and its value, for messages.
    form: how a user writes one of their own, for messages.
    also: further names that are known and mean something else.
    Raises ConfigError with the nearest way out; an error of the module's own import is named in it.
    """
    module_name, separator, attribute = built_in.get(name, name).partition(":")
    if not (separator and module_name and attribute):
        known = [*built_in, *also]
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ConfigError(
            f"{what} is not known; {hint}the built-ins are {', '.join(known)}; your own is written {form}"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{what}: importing {module_name!r} failed with {type(error).__name__}: {error}; install it, or put the "
            "folder that holds it on PYTHONPATH"
        ) from error
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError:
        candidates = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        nearest = difflib.get_close_matches(attribute, candidates, n=1, cutoff=0.0)
        hint = f"; the nearest it has is {nearest[0]!r}" if nearest else "; it defines nothing that can be called"
        raise ConfigError(f"{what}: module {module_name!r} has no {attribute!r}{hint}") from None

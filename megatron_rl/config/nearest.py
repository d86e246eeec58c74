"""Advice for an unknown key: the key that the user may mean, by other frameworks' names for it, then by spelling."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator

from megatron_rl.config.checks import hints_of
from megatron_rl.config.known_names import ELSEWHERE, NOT_HERE, RENAMED

# Least ratios of difflib: for a misspelt name in its section, for one among all names, and for any likeness.
CLOSE, SAME, LIKE = 0.7, 0.87, 0.55
MOST_NAMED = 3  # keys in one message
MOST_CHARACTERS = 100  # of a key that are compared


def all_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of every setting of a section's class, settings of sections within it included.

    prefix: the section's own key with a final dot; empty for the whole configuration.
    """
    for name, hint in hints_of(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from all_keys(hint, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def leaf_of(key: str, value: object) -> tuple[str, object]:
    """Return (dotted key, value) of one setting within an unknown key that may be a whole section.

    The setting is the first whose name another framework uses; if there is none, the first of all.

    Example: ``actor_rollout_ref`` with ``{"rollout": {"n": 8}}`` gives
    ``actor_rollout_ref.rollout.n`` and 8.
    """
    leaves = list(_leaves(key, value))
    return next(((name, held) for name, held in leaves if name_elsewhere(name)), leaves[0])


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _leaves(f"{key}.{name}", part)
    else:
        yield key, value


def _endings(key: str) -> Iterator[str]:
    """Yield every ending of a dotted key, the whole key first, each ``-`` as ``_``. Example: a-b.c gives a_b.c, c."""
    parts = key[-MOST_CHARACTERS:].replace("-", "_").split(".")
    return (".".join(parts[first:]) for first in range(len(parts)))


def name_elsewhere(key: str) -> str | None:
    """Return the longest ending of a dotted key that is a setting's name in another framework; None if none is.

    The endings of ``a.b.c`` are ``a.b.c``, ``b.c`` and ``c``.
    """
    return next((ending for ending in _endings(key) if ending in ELSEWHERE or ending in NOT_HERE), None)


def meant(root: type, cls: type, key: str, prefix: str = "") -> tuple[list[str], str]:
    """Return (keys, note): the known keys that an unknown key may mean, and a remark for the message.

    Either may be empty: ``keys`` if no known key is meant, ``note`` if there is nothing to add.

    root: the class of the whole configuration.
    key: the whole unknown key, with dots.
    prefix: the longest start of ``key`` that names a known section, with a final dot; "" if none does.
    cls: the class of that section; ``root`` if ``prefix`` is "".
    """
    name = name_elsewhere(key)
    if name in NOT_HERE:
        return [], f"there is none of this meaning: {NOT_HERE[name]}"
    if name is None:
        found = nearest(root, cls, key, prefix)
        return found, "" if found else "no known key is like it (docs/configuration.md has all)"
    target, note = ELSEWHERE[name]
    own = [prefix + target.rpartition(".")[2], *re.findall(r"[a-z_]+\.[a-z_.]*[a-z]", note)]
    mine = next((each for each in own if prefix and each in all_keys(cls, prefix)), None)
    return ([mine], "") if mine else ([target], note)


def advice(root: type, cls: type, key: str, prefix: str = "") -> str:
    """Return the part of an error message that names known keys to write in place of an unknown key.

    root: the class of the whole configuration.
    cls, prefix: the class of the section that lacks the key, and the section's name with a final dot.

    Example: ``the nearest known key is train.epochs``.
    """
    keys, note = meant(root, cls, key, prefix)
    if not keys:
        return note
    behind = f" ({note})" if note else ""
    if len(keys) == 1:
        return f"the nearest known key is {keys[0]}{behind}"
    return f"the nearest known keys are {', '.join(keys[:-1])} and {keys[-1]}{behind}"


def nearest(root: type, cls: type, key: str, prefix: str) -> list[str]:
    """Return the known keys whose spelling is nearest to an unknown key; [] if none is near.

    root: the class of the whole configuration.
    cls, prefix: the class of the section that lacks the key, and the section's name with a final dot.
    """
    own, last = key.removeprefix(prefix)[:MOST_CHARACTERS], key.rpartition(".")[2][:MOST_CHARACTERS]
    names = [field.name for field in dataclasses.fields(cls)] if prefix else []
    old = [name.removeprefix(prefix) for name in RENAMED if name.rpartition(".")[0] == prefix.rstrip(".")]

    def within(cutoff: float) -> list[str]:
        found = difflib.get_close_matches(own, names + old, n=1, cutoff=cutoff)
        return [RENAMED.get(prefix + each, prefix + each) for each in found]

    # Within the section; then the same last name anywhere; then another framework's name; then any likeness.
    if close := within(CLOSE) or [prefix + name for name in names if len(own) > 2 and name.startswith(own)]:
        return close[:MOST_NAMED]
    keys = list(all_keys(root))
    same = [each for each in keys if each.rpartition(".")[2] == last]
    if same:
        return difflib.get_close_matches(key[:MOST_CHARACTERS], same, n=1, cutoff=SAME) or same[:MOST_NAMED]
    if foreign := difflib.get_close_matches(last, ELSEWHERE, n=1, cutoff=SAME):
        return [ELSEWHERE[foreign[0]][0]]
    return within(0.0) if prefix else difflib.get_close_matches(own, keys, n=1, cutoff=LIKE)

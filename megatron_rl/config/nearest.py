"""Finds what to write in the place of a key that there is none of: by another framework's name, then by spelling."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator

from megatron_rl.config.checks import hints_of
from megatron_rl.config.known_names import ELSEWHERE, NOT_HERE, RENAMED

# Of difflib's ratio: a slip of the keyboard within a section, within all names, and what is like at all.
CLOSE, SAME, LIKE = 0.7, 0.87, 0.55
MOST_NAMED = 3
MOST_CHARACTERS = 100  # that are compared


def all_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of every setting of a section, or of the whole configuration."""
    for name, hint in hints_of(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from all_keys(hint, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def leaf_of(key: str, value: object) -> tuple[str, object]:
    """Return the first setting within an unknown section that has a name elsewhere, else its first, and its value.

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
    """Yield the key and what is left without its first words, the longest first; ``-`` counts as ``_``."""
    parts = key[-MOST_CHARACTERS:].replace("-", "_").split(".")
    return (".".join(parts[first:]) for first in range(len(parts)))


def name_elsewhere(key: str) -> str | None:
    """Return the ending of a key that is a setting's name elsewhere; None if it has none."""
    return next((ending for ending in _endings(key) if ending in ELSEWHERE or ending in NOT_HERE), None)


def meant(root: type, cls: type, key: str, prefix: str = "") -> tuple[list[str], str]:
    """Return the keys that may be meant by one that there is none of, and a note; [] where none is.

    root: the class of the whole configuration. cls, prefix: of the section that lacks the key's
        next name.
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
    """Return what to write in the place of a key, in words; the arguments are those of ``meant``."""
    keys, note = meant(root, cls, key, prefix)
    if not keys:
        return note
    behind = f" ({note})" if note else ""
    if len(keys) == 1:
        return f"the nearest known key is {keys[0]}{behind}"
    return f"the nearest known keys are {', '.join(keys[:-1])} and {keys[-1]}{behind}"


def nearest(root: type, cls: type, key: str, prefix: str) -> list[str]:
    """Return the keys that are spelled most like one, [] of none; the arguments are those of ``meant``."""
    own, last = key.removeprefix(prefix)[:MOST_CHARACTERS], key.rpartition(".")[2][:MOST_CHARACTERS]
    names = [field.name for field in dataclasses.fields(cls)] if prefix else []
    old = [name.removeprefix(prefix) for name in RENAMED if name.rpartition(".")[0] == prefix.rstrip(".")]

    def within(cutoff: float) -> list[str]:
        found = difflib.get_close_matches(own, names + old, n=1, cutoff=cutoff)
        return [RENAMED.get(prefix + each, prefix + each) for each in found]

    if close := within(CLOSE) or [prefix + name for name in names if len(own) > 2 and name.startswith(own)]:
        return close[:MOST_NAMED]
    keys = list(all_keys(root))
    same = [each for each in keys if each.rpartition(".")[2] == last]
    if same:
        return difflib.get_close_matches(key[:MOST_CHARACTERS], same, n=1, cutoff=SAME) or same[:MOST_NAMED]
    if foreign := difflib.get_close_matches(last, ELSEWHERE, n=1, cutoff=SAME):
        return [ELSEWHERE[foreign[0]][0]]
    return within(0.0) if prefix else difflib.get_close_matches(own, keys, n=1, cutoff=LIKE)

"""The settings and variables that a script's statements would change, found without executing the statements."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_rl.commands.translate.shell import statements as made

_SETTING = re.compile(r"[+~]{0,2}\w+(\.\w+)+=|--[\w-]+=")
DECLARES = ("export", "declare", "local", "readonly", "typeset")
READS = ("read", "mapfile", "readarray", "getopts", "unset", "printf", "let")
_CALCULATED = re.compile(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)")


def effects_of(body: made.Body) -> list[str]:
    """Return each assignment and each setting in ``body``, nested statements included, as it stands in the script.

    A setting is a word like ``a.b=value`` or ``--name=value`` in a command.
    """
    settings: list[str] = []
    for statement in _all(body):
        if not isinstance(statement, made.Command):
            continue
        if not statement.words or statement.words[0].text in DECLARES:
            settings += [each.source for each in statement.assignments]
            settings += [token.text for token in statement.words[1:] if "=" in token.text]
        else:
            settings += [token.text for token in statement.words if _SETTING.match(token.text)]
    return settings


def names_set(body: made.Body) -> set[str]:
    """Return the names of the variables that ``body`` and its nested statements may change."""
    names: set[str] = set()
    for statement in _all(body):
        if isinstance(statement, made.Calculation):
            names |= {first or second for first, second in _CALCULATED.findall(statement.text)}
        if not isinstance(statement, made.Command):
            continue
        name = statement.words[0].text if statement.words else ""
        if not statement.words:
            names |= {each.name for each in statement.assignments}
        elif name in DECLARES:
            names |= {re.split(r"\+?=|\[", token.text)[0] for token in statement.words[1:] if "=" in token.text}
        elif name in READS:
            names |= {token.text for token in statement.words[1:] if re.fullmatch(r"[A-Za-z_]\w*", token.text)}
    return names


def _all(body: made.Body) -> Iterator[made.Statement]:
    for statement in body:
        yield statement
        match statement:
            case made.Chain():
                yield from _all(tuple(part for _, part in statement.parts))
            case made.Negated():
                yield from _all((statement.statement,))
            case made.If():
                for condition, inner in statement.branches:
                    yield from _all((*(condition or ()), *inner))
            case made.Case():
                for _, inner in statement.branches:
                    yield from _all(inner)
            case made.Group() | made.Loop():
                yield from _all(statement.body)

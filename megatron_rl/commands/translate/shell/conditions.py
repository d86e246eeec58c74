"""The evaluation of the conditions ``[ … ]`` and ``[[ … ]]``, and of ``case`` patterns, for known values.

A condition that depends on a file is never decided, since no file is read.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.commands.translate.shell.arithmetic import NotComputed, number
from megatron_rl.commands.translate.shell.expansion import Value

MOST_NESTED = 50  # parentheses and negations within one another
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_OF_TEXTS = ("=", "==", "!=", "<", ">", "=~")
_OF_FILES = tuple(f"-{letter}" for letter in "abcdefghkprstuwxGLNOSt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Holds one word of a condition.

    value: the word's expanded text.
    pattern: the word as a pattern of ``fnmatch``, used if the operator before it takes a pattern.
    operator: whether the word is unquoted, so that it may be an operator.
    """

    value: Value
    pattern: Value
    operator: bool


def decided(terms: Sequence[Term]) -> bool | None:
    """Return whether the condition of these terms holds; None if it depends on unknown values or on files."""
    parser = _Parser(terms)
    found = parser.any_of()
    return found if parser.at == len(terms) and parser.depth < MOST_NESTED else None


def matches(value: Value, pattern: Value) -> bool | None:
    """Return whether a text matches a pattern of ``fnmatch``; None if one of the two is not known."""
    return None if value.depends or pattern.depends else fnmatch.fnmatchcase(value.text, pattern.text)


class _Parser:
    def __init__(self, terms: Sequence[Term]) -> None:
        self.terms, self.at, self.depth = terms, 0, 0

    def is_operator(self, *texts: str, ahead: int = 0) -> bool:
        place = self.at + ahead
        return place < len(self.terms) and self.terms[place].operator and self.terms[place].value.text in texts

    def any_of(self) -> bool | None:
        holds = self.all_of()
        while self.is_operator("||", "-o"):
            self.at += 1
            other = self.all_of()
            holds = True if holds or other else (None if holds is None or other is None else False)
        return holds

    def all_of(self) -> bool | None:
        holds = self.one()
        while self.is_operator("&&", "-a"):
            self.at += 1
            other = self.one()
            holds = False if holds is False or other is False else (None if holds is None or other is None else True)
        return holds

    def one(self) -> bool | None:
        left = len(self.terms) - self.at
        if self.depth >= MOST_NESTED:  # the depth stays, so that the whole is not decided
            return None
        if left >= 3 and self.is_operator(*_OF_TEXTS, *_COMPARE, "-nt", "-ot", "-ef", ahead=1):
            return self.comparison()
        if left > 1 and self.is_operator("!"):
            self.at += 1
            self.depth += 1
            holds = self.one()
            self.depth -= self.depth < MOST_NESTED
            return None if holds is None else not holds
        if left > 2 and self.is_operator("("):
            self.at += 1
            self.depth += 1
            holds = self.any_of()
            self.depth -= self.depth < MOST_NESTED
            self.at += 1
            return holds
        if left >= 2 and self.is_operator("-z", "-n", "-v", *_OF_FILES):
            operator, value = self.terms[self.at].value.text, self.terms[self.at + 1].value
            self.at += 2
            return None if value.depends or operator not in ("-z", "-n") else bool(value.text) == (operator == "-n")
        if not left:
            return False
        value = self.terms[self.at].value
        self.at += 1
        return None if value.depends else bool(value.text)

    def comparison(self) -> bool | None:
        first, operator, second = self.terms[self.at : self.at + 3]
        self.at += 3
        name = operator.value.text
        if first.value.depends or second.value.depends:
            return None
        if name in _COMPARE:
            try:
                return _COMPARE[name](number(first.value.text), number(second.value.text))
            except NotComputed:
                return None
        if name in ("=", "==", "!="):
            found = matches(first.value, second.pattern)
            return found if name != "!=" or found is None else not found
        return None

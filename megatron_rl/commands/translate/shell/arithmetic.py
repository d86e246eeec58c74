"""The evaluation of bash's arithmetic: 64-bit whole numbers, C's operators, and division that rounds towards zero."""

from __future__ import annotations

import re
from collections.abc import Callable

MOST_NESTED = 30
_TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]+|\d+#\w+|\d+)|([A-Za-z_]\w*)|(\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>&^|!~?:()=,]))"
)
_LEVELS = ("||", "&&", "|", "^", "&", "== !=", "< > <= >=", "<< >>", "+ -", "* / %")  # loosest first, left to right


class NotComputed(Exception):
    """Reports an arithmetic expression that is unsupported, divides by zero, or needs a value that is not known."""


def computed(text: str, value_of: Callable[[str], int]) -> int:
    """Return the value of an arithmetic expression that assigns no variable.

    value_of: a function that returns the number that a variable holds, and raises NotComputed if it
        is not known.

    Raises NotComputed also for an expression that is unsupported or divides by zero.

    Example: ``1024 * (2 + k)`` with k = 6 is 8192.
    """
    parser = _Parser(text, value_of)
    found = parser.choice()
    if parser.token is not None:
        raise NotComputed(text)
    return found


def _wrapped(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _divided(left: int, right: int) -> int:
    if right == 0:
        raise NotComputed("division by 0")
    found = abs(left) // abs(right)
    return found if (left < 0) == (right < 0) else -found


def _power(base: int, exponent: int) -> int:
    if exponent < 0:
        raise NotComputed("a negative exponent")
    return _wrapped(pow(base % 2**64, exponent, 2**64))


_COMPUTE: dict[str, Callable[[int, int], int]] = {
    "||": lambda a, b: int(bool(a) or bool(b)),
    "&&": lambda a, b: int(bool(a) and bool(b)),
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "&": lambda a, b: a & b,
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b),
    ">": lambda a, b: int(a > b),
    "<=": lambda a, b: int(a <= b),
    ">=": lambda a, b: int(a >= b),
    "<<": lambda a, b: a << (b % 64),
    ">>": lambda a, b: a >> (b % 64),
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _divided,
    "%": lambda a, b: a - b * _divided(a, b),
}


class _Parser:
    def __init__(self, text: str, value_of: Callable[[str], int]) -> None:
        self.value_of, self.depth = value_of, 0
        self.tokens, at = [], 0
        while at < len(text.rstrip()):
            match = _TOKEN.match(text, at)
            if not match:
                raise NotComputed(text)
            self.tokens.append(match[0].strip())
            at = match.end()
        self.at = 0

    @property
    def token(self) -> str | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self) -> str:
        if self.token is None:
            raise NotComputed("it ends early")
        self.at += 1
        return self.tokens[self.at - 1]

    def choice(self) -> int:
        self.depth += 1
        if self.depth > MOST_NESTED:
            raise NotComputed("too deep")
        value = self.level(0)
        if self.token == "?":
            self.take()
            first = self.choice()
            if self.take() != ":":
                raise NotComputed("? without :")
            second = self.choice()
            value = first if value else second
        self.depth -= 1
        return value

    def level(self, number: int) -> int:
        if number == len(_LEVELS):
            return self.power()
        value = self.level(number + 1)
        while self.token in _LEVELS[number].split():
            operator = self.take()
            value = _wrapped(_COMPUTE[operator](value, self.level(number + 1)))
        return value

    def power(self) -> int:
        base = self.unary()
        if self.token == "**":
            self.take()
            self.depth += 1
            if self.depth > MOST_NESTED:
                raise NotComputed("too deep")
            base = _power(base, self.power())
            self.depth -= 1
        return base

    def unary(self) -> int:
        signs = []
        while self.token in ("+", "-", "!", "~"):
            signs.append(self.take())
        value = self.primary()
        for sign in reversed(signs):
            value = {"+": value, "-": -value, "!": int(not value), "~": ~value}[sign]
        return _wrapped(value)

    def primary(self) -> int:
        token = self.take()
        if token == "(":
            value = self.choice()
            if self.take() != ")":
                raise NotComputed("( without )")
            return value
        if token[0].isdigit():
            return number(token)
        if token[0].isalpha() or token[0] == "_":
            return self.value_of(token)
        raise NotComputed(token)


def number(text: str) -> int:
    """Return the whole number in ``text`` as bash reads it: decimal, ``0x1f``, octal ``017``, or ``base#digits``."""
    text = text.strip()
    sign = -1 if text[:1] == "-" else 1
    digits = text.lstrip("+-") if text[1:2] not in ("+", "-") else ""
    try:
        if "#" in digits:
            base, _, digits = digits.partition("#")
            return _wrapped(sign * int(digits, int(base)))
        if digits[:2].lower() == "0x":
            return _wrapped(sign * int(digits, 16))
        if re.fullmatch(r"\d{1,40}", digits):
            return _wrapped(sign * int(digits, 8 if digits[0] == "0" and len(digits) > 1 else 10))
    except ValueError as error:
        raise NotComputed(text) from error
    raise NotComputed(text)

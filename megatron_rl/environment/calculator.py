"""A calculator as an environment: it answers ``<calc>12*34</calc>``; any other turn is the answer and ends the episode.

Python's parser reads an expression, which is evaluated node by node. Only numbers, + - * / // %,
signs and parentheses are allowed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from megatron_rl.environment.protocol import Step
from megatron_rl.errors import ConfigError
from megatron_rl.types import Prompt

MAX_EXPRESSION = 200  # characters; this bounds the depth of the tree, and so the size of every number
OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}
SIGNS: dict[type, Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def evaluate(expression: str) -> str:
    """Return the value of an expression as text: a whole number if it is one, else a decimal of 10 significant digits.

    Raises ValueError for anything that is not arithmetic, and for a division by zero.

    Example: ``evaluate("12*(3+4)")`` is "84", ``evaluate("1/3")`` is "0.3333333333".
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"{len(expression)} characters, at most {MAX_EXPRESSION} are read")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError("not an expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.10g}"
    except OverflowError:
        raise ValueError("too large") from None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            try:
                return Fraction(str(number))
            except ValueError:  # Python reads 1e999 as infinity
                raise ValueError("not a finite number") from None
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](_value(left), _value(right))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in SIGNS:
            return SIGNS[type(sign)](_value(operand))
    raise ValueError("only numbers, + - * / // %, signs and parentheses are read")


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text; None if there is none. Example: "so it is 1,408." → 1408."""
    matches = NUMBER.findall(text)
    return Fraction(matches[-1].replace(",", "")) if matches else None


class Calculator:
    """Evaluates the last call ``<opening>…<closing>`` of a turn. The value is the observation.

    A turn without a call is the answer. It earns 1.0 if its last number equals the number in column
    ``answer_key``, else 0.0.

    opening, closing: the texts that begin and end a call.
    observation: the text that the policy reads; ``{result}`` is replaced by the value, or by the
        word "error".
    answer_key: the dataset's column with the right answer.

    Example: the prompt is "12*34=". The turn "<calc>12*34</calc>" gives the observation "408". Then
    the turn "408" gives the reward 1.0.
    """

    def __init__(
        self,
        opening: str = "<calc>",
        closing: str = "</calc>",
        observation: str = "{result}",
        answer_key: str = "answer",
    ) -> None:
        if not opening or not closing or "{result}" not in observation:
            raise ConfigError(
                f"environment.arguments: opening={opening!r} and closing={closing!r} must not be empty, and "
                f"observation={observation!r} must hold {{result}}"
            )
        self.opening, self.closing, self.observation, self.answer_key = opening, closing, observation, answer_key
        self.answer: Fraction | None = None

    def reset(self, prompt: Prompt) -> None:
        """Read the right answer from the prompt's row. Raises ValueError if the answer holds no number."""
        answer = prompt.columns.get(self.answer_key)
        self.answer = last_number(str(answer))
        if self.answer is None:
            raise ValueError(
                f"column {self.answer_key!r} of prompt {prompt.prompt_id} is {answer!r:.80}, and the calculator needs "
                "a number"
            )

    def step(self, action: str) -> Step:
        before, closing, _ = action.rpartition(self.closing)
        _, opening, expression = before.rpartition(self.opening)
        if closing and opening:
            try:
                result = evaluate(expression)
            except ValueError:
                result = "error"
            return Step(observation=self.observation.replace("{result}", result))
        return Step(reward=float(last_number(action) == self.answer), done=True)

"""Checks the calculator: it computes as Python does, evaluates nothing else, and says so in its episodes."""

import contextlib
import random
from fractions import Fraction

import pytest

from megatron_rl.environment import Step
from megatron_rl.environment.calculator import MAX_EXPRESSION, Calculator, evaluate
from megatron_rl.errors import ConfigError
from megatron_rl.types import Prompt


def expression_of(generator: random.Random, depth: int, operators: list[str], number: str) -> str:
    if depth == 0 or generator.random() < 0.2:
        return number.replace("0", str(generator.randint(0, 99)))
    left, right = (expression_of(generator, depth - 1, operators, number) for _ in range(2))
    return f"({left}{generator.choice(operators)}{right})"


@pytest.mark.parametrize(
    ("operators", "number"), [(["+", "-", "*", "//", "%", " * "], "0"), (["+", "-", "*", "/", "%"], "F(0)")]
)
def test_values_equal_pythons(operators: list[str], number: str) -> None:
    """Values equal Python's, of whole numbers and of fractions, which Python writes as F(3)."""
    generator, compared = random.Random(0), 0
    for _ in range(500):
        expression = expression_of(generator, 3, operators, number)
        try:
            wanted = Fraction(eval(expression, {"F": Fraction}))
        except ZeroDivisionError:
            with pytest.raises(ValueError, match="division by zero"):
                evaluate(expression.replace("F", ""))
            continue
        written = str(wanted) if wanted.denominator == 1 else f"{float(wanted):.10g}"
        assert evaluate(expression.replace("F", "")) == written
        compared += 1
    assert compared > 300


REFUSED = (
    *("__import__('os')", "x", "1;2", "2**9", "'a'*3", "(1).real", "[1]"),
    *("1 if 1 else 2", "1<<9", "True", "1j", "", "1e999", "\0", "f()"),
)


def test_anything_but_arithmetic_is_refused_and_a_long_expression_ends_soon() -> None:
    """What its bounds on length and size keep out takes hours."""
    for expression in REFUSED:
        with pytest.raises(ValueError):
            evaluate(expression)
            pytest.fail(f"{expression!r} was not refused")
    for expression in ("(" * 99 + "1" + ")" * 99, "-" * 199 + "1", "9" * 200, "1e300*" * 28 + "1", "9*" * 99 + "9"):
        assert len(expression) <= MAX_EXPRESSION
        with contextlib.suppress(ValueError):
            evaluate(expression)
    with pytest.raises(ValueError, match="201 characters"):
        evaluate("1" * 201)


def prompt_of(answer: object) -> Prompt:
    return Prompt(prompt_id="0@0", text="", token_ids=(1,), columns={"answer": answer})


def test_an_episode_and_the_marks_and_words_that_are_given() -> None:
    calculator = Calculator()
    calculator.reset(prompt_of("1,408"))
    assert calculator.step("I try <calc>1</calc> and <calc>11*128</calc>") == Step(observation="1408")
    assert calculator.step("<calc>11**128</calc>") == Step(observation="error")
    assert calculator.step("of 3 tries: 1408.") == Step(reward=1.0, done=True)
    assert calculator.step("1,408") == Step(reward=1.0, done=True)
    assert calculator.step("</calc> 1407 <calc>") == calculator.step("none") == Step(reward=0.0, done=True)
    calculator = Calculator(opening="[", closing="]", observation="={result};", answer_key="gold")
    calculator.reset(Prompt(prompt_id="0@0", text="", token_ids=(1,), columns={"gold": 7}))
    assert calculator.step("[3+4]") == Step(observation="=7;")
    assert calculator.step("7") == Step(reward=1.0, done=True)
    with pytest.raises(ConfigError, match="must hold {result}"):
        Calculator(observation="result")
    with pytest.raises(ValueError, match="column 'answer' of prompt 0@0 is 'none'"):
        Calculator().reset(prompt_of("none"))

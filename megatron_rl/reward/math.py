"""The built-in reward function ``math_verify``: mathematical equality by the library math-verify (checked on 0.9.0)."""

from __future__ import annotations

import functools
import logging
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from math_verify import parse, verify
from sympy import Expr, Number

from megatron_rl.reward.final_answer import final_answer, has_mark, number_text, without_currency

log = logging.getLogger(__name__)
for _module in ("math_verify.parser", "math_verify.grader"):  # they warn if their own deadlines are off
    logging.getLogger(_module).addFilter(lambda record: not str(record.msg).startswith("Timeout is disabled"))

QUICK_S = 0.25  # for each answer of a call; nearly all are judged in milliseconds
PATIENT_S = 5.0  # for an answer that was not judged in QUICK_S
BATCH_S = 10.0  # for all answers of a call that get PATIENT_S
GOLD_S = 5.0  # for the reading of one gold answer
_AGAIN_S = 0.5  # after this time an interrupt that a library swallowed comes again

_MIXED_NUMBER = re.compile(r"(?<![\d.])(\d+)\s+(\d+)/(\d+)")
_DELIMITERS = ("$", "\\(", "\\[")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gold:
    """Holds a parsed gold answer.

    values: the answer as sympy objects. A right answer equals one of them.
    is_number: whether the gold answer is a number. If so, the words behind the number after a
        completion's mark, as in "#### 42 apples", are ignored.
    marks_first: whether the gold answer is in GSM8K's format, so that a completion's `####` is
        looked for before a box.
    """

    values: tuple[object, ...]
    is_number: bool
    marks_first: bool


class _Overdue(BaseException):
    """Interrupts a judgement whose time is over; no ``except Exception`` of a library catches it."""


def math_verify(
    prompts: Sequence[str],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[object],
    **_: object,
) -> list[float]:
    """Return [S]: 1.0 if a completion's answer equals the ``answer`` column mathematically, else 0.0.

    So 1/2 equals 0.5, and 1,000 equals 1000. A completion's answer stands after the last mark,
    ``####`` (GSM8K) or \\boxed{} (MATH); the text around it does not count
    (reward/final_answer.py). Without a mark math-verify looks for LaTeX between dollars or a plain
    number. A gold answer is one expression, with or without a mark or dollars around it. A
    completion in which nothing parses, or that cannot be compared, scores 0.0.

    A completion also scores 0.0 if it is not judged in time or the library fails on it. The log
    says so. Each completion has QUICK_S seconds. Completions that need more get up to PATIENT_S
    each, and BATCH_S together. So a call on n answers takes at most n · QUICK_S + BATCH_S.

    Raises ValueError for a gold answer that does not parse; a run's start looks for such answers.
    Raises RuntimeError outside the main thread, since the time limits use SIGALRM, which Python
    allows only there. The alarm interrupts Python code, but no single long operation of a C
    extension.
    """
    # Each different pair of completion and gold answer, quickly, then again with more time.
    _need_main_thread()
    golds = [read_gold(str(gold)) for gold in answer]
    texts = dict.fromkeys(zip(completions, map(str, answer), strict=True))
    by_gold = dict(zip(map(str, answer), golds, strict=True))
    scores = {pair: _within(QUICK_S, _judge, pair[0], by_gold[pair[1]]) for pair in texts}
    until = time.monotonic() + BATCH_S
    for pair in [pair for pair, score in scores.items() if score is None]:
        left = until - time.monotonic()
        if left > 0:
            scores[pair] = _within(min(PATIENT_S, left), _judge, pair[0], by_gold[pair[1]])
    # Warnings of pairs without a score, and the scores of all completions.
    overdue = [pair for pair in texts if scores[pair] is None]
    _warn(f"could not judge within {PATIENT_S:g} s each and {BATCH_S:g} s in all", overdue, len(texts))
    failed: dict[type, list] = {}
    for pair, score in scores.items():
        if isinstance(score, Exception):
            failed.setdefault(type(score), []).append(pair)
    for pairs in failed.values():
        _warn(f"failed on ({scores[pairs[0]]!r:.200})", pairs, len(texts))
    judged = {pair: score for pair, score in scores.items() if isinstance(score, float)}
    return [judged.get(pair, 0.0) for pair in zip(completions, map(str, answer), strict=True)]


def _warn(fault: str, pairs: Sequence[tuple[str, str]], num_texts: int) -> None:
    """Log that completions count as wrong, with the reason and the end of the first completion.

    fault: what math_verify could not do, for the message.
    pairs: (completion, gold answer) for each of these completions.
    num_texts: the number of all pairs of the call.
    """
    if pairs:
        log.warning(
            "math_verify %s: %d of %d completions; each counts as wrong. The first, against the answer %.80r, ends in "
            "%r",
            *(fault, len(pairs), num_texts, pairs[0][1], pairs[0][0][-200:]),
        )


def _judge(completion: str, gold: Gold) -> float | Exception:
    """Return a completion's score, or the exception that math-verify raised on it."""
    try:
        return _score(completion, gold)
    except Exception as error:  # noqa: BLE001  (RecursionError, sympy's own, what Python's eval raises)
        return error


@functools.lru_cache(maxsize=65536)
def read_gold(gold: str) -> Gold:
    """Return a gold answer, parsed and ready to be compared.

    Raises ValueError if nothing in it parses, or if parsing takes longer than GOLD_S.
    """
    number = number_text(gold)
    if number is not None:
        return Gold(values=(Number(number),), is_number=True, marks_first=False)
    _need_main_thread()
    marks_first = has_mark(gold)
    found = final_answer(gold, marks_first=marks_first, wants_number=True)
    text = found.text.strip()
    number = number_text(text)
    if number is not None:
        return Gold(values=(Number(number),), is_number=True, marks_first=marks_first)
    values = _within(GOLD_S, _read_expression, text)
    if values is None:
        raise ValueError(
            f"gold answer {gold[:200]!r} takes math-verify over {GOLD_S:g} s to parse; write it out, or remove the row"
        )
    if not values:
        raise ValueError(
            f"gold answer {gold[:200]!r} is nothing that math-verify can parse; mend the dataset's answer column, or "
            "remove the row"
        )
    is_number = len(values) == 1 and isinstance(values[0], Expr) and bool(values[0].is_number)
    return Gold(values=tuple(values), is_number=is_number, marks_first=marks_first)


def _need_main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"math_verify was called from thread {threading.current_thread().name!r}: its deadlines need SIGALRM, "
            "which works in a process's main thread only; score in the main thread, or use a reward function of your "
            "own that needs no signal"
        )


def _within(seconds: float, function: Callable, *arguments: object) -> object:
    """Return the result of ``function(*arguments)``, or None if the call takes longer than ``seconds``."""

    def interrupt(*_: object) -> None:
        raise _Overdue

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
        try:
            return function(*arguments)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _Overdue:
        return None
    finally:
        signal.signal(signal.SIGALRM, before)


def _score(completion: str, gold: Gold) -> float:
    answer = final_answer(completion, marks_first=gold.marks_first, wants_number=gold.is_number)
    number = number_text(answer.text) if answer.is_marked else None
    if number is not None:
        values = [Number(number)]
    elif answer.is_marked:
        values = _read_expression(answer.text)
    else:
        values = _parse(answer.text, fallback_mode="first_match")
    return float(any(_equal(gold_value, value) for gold_value in gold.values for value in values))


def _read_expression(text: str) -> list:
    text = _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", text)  # math-verify would read "1 1/2" as a product
    # In a box, because math-verify would look for a number in a bare text, and read "1+x" as 1.
    if text and not any(delimiter in text for delimiter in _DELIMITERS):
        boxed = _parse(f"\\boxed{{{text}}}", fallback_mode="no_fallback")
        if boxed:
            return boxed
    return _parse(without_currency(text), fallback_mode="no_fallback")


def _parse(text: str, fallback_mode: str) -> list:
    return parse(text, fallback_mode=fallback_mode, parsing_timeout=0)


def _equal(gold_value: object, value: object) -> bool:
    try:
        return verify(gold_value, value, timeout_seconds=0, raise_on_error=True)
    except Exception:
        # sympy refuses comparisons in many ways (sets with numbers, NaN): such values are not equal.
        log.debug("math-verify could not compare a completion's answer with the gold answer", exc_info=True)
        return False

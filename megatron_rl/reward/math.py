"""Mathematical equality: a reward function by the math-verify library (checked on 0.9.0)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from math_verify import parse, verify
from math_verify.errors import TimeoutException

logger = logging.getLogger(__name__)

# Whole seconds, math-verify's own default: it hands them to signal.alarm, which takes nothing finer.
PARSE_TIMEOUT_S = 5
COMPARE_TIMEOUT_S = 5

_FINAL_ANSWER = "####"  # GSM8K's mark
_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


def math_verify(
    prompts: Sequence[str],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[object],
    **_: object,
) -> list[float]:
    """Return [S]: 1.0 where a completion's answer equals the ``answer`` column mathematically, else 0.0.

    So 1/2 equals 0.5, and 1,000 equals 1000. Of a text with ``####``, only the part after the last one is read (GSM8K).
    A gold answer is one expression, with or without \\boxed{} or dollars around it. In a completion math-verify looks
    for the answer: \\boxed{}, LaTeX between dollars, a plain number. A completion in which nothing parses, or that
    cannot be compared with the gold answer, scores 0.0.

    Raises ValueError for a gold answer that does not parse, TimeoutError where a parse or a comparison takes over 5 s
    (a timeout is no verdict: ``reward.on_error`` decides), RuntimeError outside the main thread: the deadlines are
    SIGALRM, which Python allows there only, and a completion such as 9**9**9**9 may not be left without one. The alarm
    interrupts Python code; a single long operation inside a C extension ends first.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"math_verify was called from thread {threading.current_thread().name!r}: its deadlines need SIGALRM, "
            "which works in a process's main thread only; score in the main thread, or use a reward function of your "
            "own that needs no signal"
        )
    return [_score(text, str(gold)) for text, gold in zip(completions, answer, strict=True)]


def _score(completion: str, gold: str) -> float:
    gold_values = _parse_gold(gold.rpartition(_FINAL_ANSWER)[2].strip())
    if not gold_values:
        raise ValueError(
            f"gold answer {gold!r} is nothing that math-verify can parse; mend the dataset's answer column"
        )
    values = _parse(completion.rpartition(_FINAL_ANSWER)[2], "completion")
    return float(any(_equal(gold_value, value) for gold_value in gold_values for value in values))


def _parse_gold(gold: str) -> list:
    # Boxed, because math-verify would look for a number in a bare text, and take "1+x" for 1.
    if gold and not any(delimiter in gold for delimiter in _DELIMITERS):
        boxed = _parse(f"\\boxed{{{gold}}}", "gold answer", fallback_mode="no_fallback")
        if boxed:
            return boxed
    return _parse(gold, "gold answer", fallback_mode="no_fallback")


def _parse(text: str, what: str, fallback_mode: str = "first_match") -> list:
    try:
        return parse(text, fallback_mode=fallback_mode, parsing_timeout=PARSE_TIMEOUT_S)
    except TimeoutException:
        raise TimeoutError(f"parsing the {what} took over {PARSE_TIMEOUT_S} s: {text[-200:]!r}") from None


def _equal(gold_value: object, value: object) -> bool:
    # raise_on_error, because without it math-verify turns a timeout into "not equal".
    try:
        return verify(gold_value, value, timeout_seconds=COMPARE_TIMEOUT_S, raise_on_error=True)
    except TimeoutException:
        # Without the values: str() of those that sympy could not compare in time can itself take forever.
        raise TimeoutError(
            f"comparing the completion's answer with the gold answer took over {COMPARE_TIMEOUT_S} s"
        ) from None
    except Exception:
        # sympy refuses comparisons in many ways (sets with numbers, NaN): such values are not equal.
        logger.debug("math-verify could not compare a completion's answer with the gold answer", exc_info=True)
        return False

"""Finds the error in a process's output."""

from __future__ import annotations

import re


def reason_in(log: str) -> str:
    """Return the error of a log: the first "SomethingError: ..." that is not the launcher's, without paths.

    The last line, if no line is an error; never a warning of torch's C++ part, which ends many logs.
    """
    lines = [re.sub(r"^(\[rank\d+\]:\s*)+", "", line).strip() for line in log.splitlines()]
    lines = [line for line in lines if not re.match(r"\[[IW]\d{4} ", line)]
    errors = [
        line
        for line in lines
        if re.match(r"^[\w.]*(Error|Exception|Gradient|Interrupt)\b(:|$)", line) and "ChildFailed" not in line
    ]
    reason = errors[0] if errors else next((line for line in reversed(lines) if line), "no output")
    return without_paths(reason)[:300]


def without_paths(text: str) -> str:
    return re.sub(r"(?<![\w/])/[\w.+-]+(/[\w.+@-]+)+", "<path>", text)

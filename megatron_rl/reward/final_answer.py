r"""The final answer of a text, found by the mark of its format: GSM8K's ``#### 42`` or MATH's ``\boxed{42}``.

GSM8K's answer is the number after ``####`` (arXiv:2110.14168). MATH's answer is the content of the
last box (arXiv:2103.03874). The text around the answer does not count. If a text has both marks,
the last one counts. In a text without a mark, the answer is looked for below a Markdown heading
"Final answer".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MOST_DIGITS = 1000  # Python refuses to read a whole number of more than 4300 digits
_MARK = re.compile(r"(?<!#)####(?!#)")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|[^\s{$]+)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # after a backslash a brace is a plain character
_BETWEEN_BOXES = re.compile(r"[\s$]*(?:,|,?\s*(?:and|or))[\s$]*")

_ANSWER_HEADING = re.compile(
    r"^[ \t]*(?:#{1,6}|\*\*)[ \t*]*(?:the[ ]+)?(?:final[ ]+)?(?:answer|result)[ \t:*]*\n", re.IGNORECASE | re.MULTILINE
)
_DOLLAR = r"\\(?:text|mathrm|textrm|mbox)\s*\{\s*\\?[$€£¥₹]\s*\}|(?<!\\)\\\$"
_CURRENCY = re.compile(rf"{_DOLLAR}|\\(?:pounds|euro|yen)(?![A-Za-z])|[€£¥₹]")
_OPENING = re.compile(r"(?:\s|\*\*|__|\$|\\\(|\\\[|~)*")
_LEAD = re.compile(r"(?:(?:the|my|our|so|final|answer|result|is|equals)\b[\s*_]*|[:=][\s*_]*)+", re.IGNORECASE)
_SEPARATOR = r"(?:,\\!|\{,\}|,|\\,|\\!|\\ |[ \u00a0\u202f])"
_NUMBER = re.compile(
    rf"(?P<sign>[-−+]?)[\s$]*(?:(?P<grouped>\d{{1,3}}(?:{_SEPARATOR}\d{{2,3}})*{_SEPARATOR}\d{{3}}(?!\d))"
    r"|(?P<digits>\d+))?(?P<decimals>\.\d+)?"
)
# Text after a number that makes it part of an expression: 2^{10}, 1/2, 40+2, 3\sqrt{2}, 10%, (1,2).
_GOES_ON = re.compile(
    r"\s+\d+/\d|\s*(?:[\^×÷+]|\*\s*[\d(\\a-z]|\*\*\s*[\d(]|/\s*[\d(\\]|[-−]\s*[\d(\\]|,\s*[-−]?\d|_\{?\d|:\d|\\?%|"
    r"\\(?!text|mathrm|mbox|textrm|textbf|[\])$,;! ]|quad|circ))"
)
_NUMBERED_HEADING = re.compile(r"[.):]\s+\S")
_WORDS = re.compile(r"\s+(?=[A-Za-z]{2,}|\(\s*[A-Za-z]{2,})|[.;,](?=\s|$)")  # end an expression
_HEADING = re.compile(r"[^\W\d_]{3,}(?=[\s:.!?,;*]|$)")
# Units in words after a number: "42 dollars", "42 cm^2"; mathematical words are excluded.
_UNIT = re.compile(
    r"\s+(?!(?:and|or|to|pi|mod|inf|infinity|sqrt|sin|cos|tan|log|ln|exp|times)\b)"
    r"(?:[a-z]*[aeiou][a-z]+[a-z]|cm|mm|km|kg|mg|ml|ft|lb|lbs|oz|hr|hrs|mph|sq)\b"
    r"(?:[\s/.]+[a-z]+)*\.?(?:\^\{?[23]\}?)?\s*",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalAnswer:
    """Holds the final answer of a text.

    text: the answer, without currency signs. If the text has no mark, the whole text.
    is_marked: whether ``text`` is one expression that a mark or a heading introduced.
    """

    text: str
    is_marked: bool


def number_text(text: str) -> str | None:
    r"""Return the number that the whole text states, in Python's notation; None if it is not one number.

    Units in words may follow the number.

    Examples: ``\$32,\!348`` gives "32348", ``-1,000.50 dollars`` gives "-1000.50", ``1/2`` and
    ``2x`` give None.
    """
    found = _number_at(without_currency(text).strip().removesuffix("."))
    if found is None or len(found[0]) > _MOST_DIGITS:
        return None
    number, rest = found
    is_whole = not rest.strip(" $") or (_UNIT.fullmatch(rest) and not _GOES_ON.match(rest))
    return number if is_whole else None


def without_currency(text: str) -> str:
    return _CURRENCY.sub("", text).replace("\\!", "")


def has_mark(gold: str) -> bool:
    """Return whether a gold answer has GSM8K's mark ``####``.

    If it has, ``####`` takes precedence over boxes in completions.
    """
    return _MARK.search(gold) is not None


def final_answer(text: str, *, marks_first: bool, wants_number: bool) -> FinalAnswer:
    """Return the final answer of a completion, or of a gold answer with its derivation.

    marks_first: whether a ``####`` takes precedence over boxes, even over boxes behind it.
    wants_number: whether the gold answer is a number. If so, the words behind the number after a
        mark, as in "#### 42 apples", are left out.
    """
    mark, box = _last_mark(text, marks_first, wants_number), _last_box(text)
    if mark is not None and (marks_first or box is None or mark[0] > box[0]):
        return FinalAnswer(text=mark[1], is_marked=True)
    if box is not None:
        return FinalAnswer(text=box[1], is_marked=True)
    below = None if marks_first else _below_heading(text, wants_number)
    if below is not None:
        return FinalAnswer(text=below, is_marked=True)
    marks = list(_MARK.finditer(text))
    if marks and (marks_first or not text[marks[-1].end() :].strip()):
        text = text[marks[-1].end() :]
    return FinalAnswer(text=without_currency(text), is_marked=False)


def _last_mark(text: str, marks_first: bool, wants_number: bool) -> tuple[int, str] | None:
    """Return (position in the text, answer) of the last ``####`` with an answer behind it; None if there is none.

    A ``####`` may also be a Markdown heading, which has no answer.

    marks_first, wants_number: see ``final_answer``.
    """
    for mark in reversed(list(_MARK.finditer(text))):
        answer = _leading_answer(text[mark.end() :], wants_number, may_be_heading=not marks_first)
        if answer is not None:
            return mark.start(), answer
    return None


def _below_heading(text: str, wants_number: bool) -> str | None:
    """Return the answer below the last Markdown heading "Answer" or "Final answer"; None if there is none.

    wants_number: see ``final_answer``.
    """
    for heading in reversed(list(_ANSWER_HEADING.finditer(text))):
        answer = _leading_answer(text[heading.end() :], wants_number, may_be_heading=False)
        if answer is not None:
            return answer
    return None


def _leading_answer(text: str, wants_number: bool, *, may_be_heading: bool) -> str | None:
    """Return the answer at the beginning of a text's first line; None if the line begins with words, or has a box.

    may_be_heading: whether a number before words, as in "1. Setup", is the number of a heading, and
        so no answer.
    wants_number: see ``final_answer``.
    """
    # The first line, without marks and words such as "The answer is".
    line = without_currency(text.lstrip().split("\n", 1)[0])
    line = line[_OPENING.match(line).end() :]
    lead = _LEAD.match(line)
    line = line[lead.end() :] if lead else line
    if _BOX.search(line):
        return None  # the box is the answer
    # A number, else the line or its part before words.
    number = _number_at(line)
    if number is not None and may_be_heading and _NUMBERED_HEADING.match(number[1]):
        return None
    if number is not None and wants_number and not _GOES_ON.match(number[1]):
        return number[0]
    if not line.strip() or _HEADING.match(line):
        return None
    line = _WORDS.split(line, maxsplit=1)[0] if wants_number else line
    return re.sub(r"\*\*$|__$|\.$|(?:\$|\\\)|\\\])\s*\.?$", "", line.strip())


def _last_box(text: str) -> tuple[int, str] | None:
    """Return (position in the text, content) of the last box, joined with boxes before it; None without a box.

    Boxes are joined if only a comma, "and" or "or" is between them. The content is empty for a box
    that does not end: the text was cut in the middle of its answer.
    """
    boxes: list[tuple[int, int, str]] = []
    position = 0
    while box := _BOX.search(text, position):
        content, position = _content(text, box)
        boxes.append((box.start(), position, content))
    if not boxes:
        return None
    last, start, answer = boxes[-1][0], boxes[-1][0], boxes[-1][2]
    for before in reversed(boxes[:-1]):
        if not answer or not _BETWEEN_BOXES.fullmatch(text, before[1], start):
            break
        start, answer = before[0], f"{before[2]}, {answer}"
    return last, without_currency(answer)


def _content(text: str, box: re.Match) -> tuple[str, int]:
    """Return a box's content, and the position in the text where the box ends. ``box``: the match of its beginning."""
    if box[1] != "{":
        return box[1].rstrip(".,;"), box.end()
    depth = 1
    for brace in _BRACE.finditer(text, box.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            content = text[box.end() : brace.start()]
            inner = _last_box(content)
            return (content if inner is None else inner[1]), brace.end()
    return "", len(text)


def _number_at(text: str) -> tuple[str, str] | None:
    """Return (number, text after it) for a text that begins with a number; None if it does not."""
    text = text[_OPENING.match(text).end() :]
    number = _NUMBER.match(text)
    if not (number["grouped"] or number["digits"] or number["decimals"]):
        return None
    whole = re.sub(r"\D", "", number["grouped"] or number["digits"] or "0").lstrip("0") or "0"
    sign = "-" if number["sign"] in ("-", "−") else ""
    return f"{sign}{whole}{number['decimals'] or ''}", text[number.end() :]

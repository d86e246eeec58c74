"""The tokenizer of a script: words with their quotes and expansions, operators, and arrays. Nothing is expanded here.

The grammar is bash's, as launch scripts use it. The text of a here-document is skipped. An unclosed
construct raises ScriptError with its line, and a word of more than 8192 characters raises TooLong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_rl.errors import ConfigError, quoted

MOST_WORD = 2**13  # the most characters of a word, and of a variable's value
OPERATORS = [
    "&&",
    "||",
    ";;&",
    ";;",
    ";&",
    ";",
    "&>>",
    "&>",
    "&",
    "|&",
    "|",
    "(",
    ")",
    "<<<",
    "<<-",
    "<<",
    ">>",
    ">&",
    "<&",
    ">|",
    "<>",
    ">",
    "<",
]
REDIRECTIONS = frozenset(["&>>", "&>", "<<<", "<<-", "<<", ">>", ">&", "<&", ">|", "<>", ">", "<"])
_OPERATOR = re.compile("|".join(map(re.escape, OPERATORS)))
_PARAMETER = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_ARRAY = re.compile(r"\w+\+?=")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "e": "\x1b", "a": "\a", "b": "\b", "\\": "\\", "'": "'", '"': '"'}


class ScriptError(ConfigError):
    """Reports which part of a script cannot be read, and on which line."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(f"line {line}: {why}")


class TooLong(Exception):
    """Reports a word, list or value that exceeds its limit of length; the message holds its beginning."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Holds a piece of a word: literal text or one expansion.

    kind: ``text``, ``parameter`` for ``${…}``, ``arithmetic`` for ``$((…))``, or ``command`` for
        ``$(…)``.
    text: the literal text, or what stands within the brackets of the expansion.
    quoted: whether the piece stands within quotes.

    Example: ``a="$b"`` is Piece("text", "a=", False), Piece("parameter", "b", True).
    """

    kind: str
    text: str
    quoted: bool

    @property
    def source(self) -> str:
        """Return this piece of a word as it stands in the script, such as ``${name:-default}``."""
        match self.kind:
            case "parameter":
                return f"${self.text}" if _PARAMETER.fullmatch(self.text) else f"${{{self.text}}}"
            case "arithmetic":
                return f"$(({self.text}))"
            case "command":
                return f"$({self.text})"
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """Holds a token of a script: a word, an operator, an array's assignment ``name=(…)``, or ``((…))``.

    kind: ``word``, ``operator``, ``array``, ``arithmetic`` or ``end``.
    text: a word or an operator as it stands in the script, ``name=`` or ``name+=`` of an array, or
        the text within ``((…))``. A line's end is the operator ``\\n``.
    pieces: the pieces of a word; () for other kinds.
    items: the elements of an array; () for other kinds.
    """

    kind: str
    text: str
    line: int
    pieces: tuple[Piece, ...] = ()
    items: tuple[Token, ...] = ()


def closing(text: str, start: int, closer: str) -> int:
    """Return the position in ``text`` at which a construct is closed; -1 if it is not closed.

    start: the position at which the construct's content begins.
    closer: the text that closes the construct. Within quotes or nested constructs it does not
        count.
    """
    stack, at = [closer], start
    while at < len(text):
        top, char = stack[-1], text[at]
        if char == "\\":
            at += 2
        elif text.startswith(top, at):
            stack.pop()
            if not stack:
                return at
            at += len(top)
        elif char == "'" and top != '"':
            at = text.find("'", at + 1) + 1
            if at == 0:
                return -1
        elif char == "$" and text[at + 1 : at + 2] in ("{", "("):
            stack.append("}" if text[at + 1] == "{" else ")")
            at += 2
        elif char == '"' or (char == "(" and top in (")", "))")):
            stack.append('"' if char == '"' else ")")
            at += 1
        else:
            at += 1
    return -1


def tokens_of(script: str) -> list[Token]:
    """Return the tokens of a script; the last one has the kind ``end``. Raises ScriptError or TooLong."""
    return _Lexer(script).all()


def word_of(text: str, quoted: bool) -> tuple[Piece, ...]:
    """Return the pieces of a text that stands within an expansion, such as the default after ``:-``.

    quoted: whether the expansion stands within double quotes.
    """
    lexer = _Lexer(text)
    pieces: list[Piece] = []
    while lexer.at < len(text):
        if quoted and text[lexer.at] == '"':  # "${a:-"b"}" is b
            lexer.at += 1
        elif quoted:
            lexer.part_of_quoted(pieces, stops='"')
        elif text[lexer.at].isspace():
            lexer.text(pieces, text[lexer.at], 1, quoted=False)
        else:
            lexer.part(pieces)
    return tuple(pieces)


class _Lexer:
    def __init__(self, script: str) -> None:
        self.script, self.at, self.line = script, 0, 1
        self.documents: list[tuple[str, bool]] = []  # here-documents whose text begins after this line

    def all(self) -> list[Token]:
        found: list[Token] = []
        while (token := self.next(found[-1] if found else None)) is not None:
            found.append(token)
        return [*found, Token(kind="end", text="", line=self.line)]

    def fail(self, what: str) -> ScriptError:
        return ScriptError(self.line, f"{quoted(what, 40)} is not closed; close it, or write the settings in a YAML")

    def skip_blanks(self) -> None:
        script = self.script
        while self.at < len(script):
            if script[self.at] in " \t\r":
                self.at += 1
            elif script.startswith("\\\n", self.at):
                self.at, self.line = self.at + 2, self.line + 1
            elif script[self.at] == "#":
                end = script.find("\n", self.at)
                self.at = len(script) if end < 0 else end
            else:
                return

    def next(self, last: Token | None) -> Token | None:
        """Return the next token; None at the end of the script.

        last: the token before the next one; it decides whether ``((`` can begin an arithmetic
            statement.
        """
        self.skip_blanks()
        while opening := re.compile(r"<<-?(?![<])").match(self.script, self.at):
            self.at = opening.end()
            self.skip_blanks()
            delimiter = self.word()
            self.documents.append(("".join(piece.text for piece in delimiter.pieces), opening[0] == "<<-"))
            self.skip_blanks()
        script, line = self.script, self.line
        if self.at >= len(script):
            return None
        if script[self.at] == "\n":
            self.at, self.line = self.at + 1, line + 1
            self.leave_documents_out()
            return Token(kind="operator", text="\n", line=line)
        begins = last is None or last.kind == "operator" or last.text in ("if", "while", "until", "elif", "for", "do")
        if script.startswith("((", self.at) and begins:
            end = closing(script, self.at + 2, "))")
            if end < 0:
                raise self.fail("((")
            text = script[self.at + 2 : end]
            self.at, self.line = end + 2, line + text.count("\n")
            return Token(kind="arithmetic", text=text, line=line)
        operator = _OPERATOR.match(script, self.at)
        if operator and script[self.at : self.at + 2] not in ("<(", ">("):
            self.at = operator.end()
            return Token(kind="operator", text=operator[0], line=line)
        return self.word()

    def leave_documents_out(self) -> None:
        for delimiter, tabs in self.documents:
            while self.at < len(self.script):
                end = self.script.find("\n", self.at)
                end = len(self.script) if end < 0 else end
                content = self.script[self.at : end]
                self.at, self.line = end + 1, self.line + 1
                if (content.lstrip("\t") if tabs else content) == delimiter:
                    break
        self.documents = []

    def word(self) -> Token:
        start, line, pieces = self.at, self.line, []
        while self.at < len(self.script):
            char = self.script[self.at]
            if char in " \t\r\n;&|)" or (char in "<>" and self.script[self.at : self.at + 2] not in ("<(", ">(")):
                break
            if char == "(":
                if _ARRAY.fullmatch(self.script, start, self.at):
                    return self.array(self.script[start : self.at], line)
                break
            self.part(pieces)
            if self.at - start > MOST_WORD:
                raise TooLong(f"a word, {quoted(self.script[start : self.at], 40)},")
        text = self.script[start : self.at]
        self.line = line + text.count("\n")
        if text.isdigit() and self.script[self.at : self.at + 1] in ("<", ">"):  # of a redirection, as in 2>&1
            return self.next(None)  # type: ignore[return-value]
        return Token(kind="word", text=text, line=line, pieces=tuple(pieces))

    def array(self, name: str, line: int) -> Token:
        self.at += 1
        items: list[Token] = []
        while True:
            token = self.next(items[-1] if items else Token(kind="word", text="(", line=line))
            if token is None:
                self.line = line
                raise self.fail(f"{name}(")
            if token.kind == "operator" and token.text == ")":
                return Token(kind="array", text=name, line=line, items=tuple(items))
            if token.kind == "word":
                items.append(token)
            elif token.text != "\n":
                raise ScriptError(token.line, f"{quoted(token.text)} stands in the array {name[:40]}; quote it")

    def text(self, pieces: list[Piece], text: str, length: int, *, quoted: bool) -> None:
        self.at += length
        if text or quoted:
            pieces.append(Piece("text", text, quoted))

    def part(self, pieces: list[Piece]) -> None:
        """Read the next quotation, expansion or plain text of a word, and append its pieces to ``pieces``."""
        script, at = self.script, self.at
        match script[at]:
            case "\\":
                self.text(pieces, (script[at + 1 : at + 2] or "\\").replace("\n", ""), 2, quoted=True)
            case "'":
                end = script.find("'", at + 1)
                if end < 0:
                    raise self.fail(script[at : at + 40])
                self.text(pieces, script[at + 1 : end], end + 1 - at, quoted=True)
            case '"':
                self.quoted(pieces)
            case "$" if script[at + 1 : at + 2] == "'":
                end = closing(script, at + 2, "'")
                if end < 0:
                    raise self.fail(script[at : at + 40])
                text = re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[0]), script[at + 2 : end], flags=re.DOTALL)
                self.text(pieces, text, end + 1 - at, quoted=True)
            case "$" | "`" | "<" | ">":
                self.expansion(pieces, quoted=False)
            case _:
                found = re.compile(r"[^\\'\"$`\s;&|()<>]+").match(script, at)
                text = found[0] if found else script[at]
                self.text(pieces, text, len(text), quoted=False)

    def quoted(self, pieces: list[Piece]) -> None:
        end = closing(self.script, self.at + 1, '"')
        if end < 0 or end - self.at > MOST_WORD:
            beginning = self.script[self.at : self.at + 40]
            raise self.fail(beginning) if end < 0 else TooLong(f"a word, {quoted(beginning, 40)},")
        inner = _Lexer(self.script[self.at + 1 : end])
        inner.line = self.line
        if not inner.script:
            pieces.append(Piece("text", "", True))
        while inner.at < len(inner.script):
            inner.part_of_quoted(pieces)
        self.at = end + 1

    def part_of_quoted(self, pieces: list[Piece], stops: str = "") -> None:
        script, at = self.script, self.at
        if script[at] == "\\" and script[at + 1 : at + 2] in ("$", "`", '"', "\\", "\n"):
            self.text(pieces, script[at + 1].replace("\n", ""), 2, quoted=True)
        elif script[at] in "$`":
            self.expansion(pieces, quoted=True)
        else:
            found = re.compile(rf"[^\\$`{stops}]+").match(script, at)
            text = found[0] if found else script[at]
            self.text(pieces, text, len(text), quoted=True)

    def expansion(self, pieces: list[Piece], *, quoted: bool) -> None:
        """Read one expansion and append it to ``pieces``.

        An expansion is ``$name``, ``${…}``, ``$((…))``, ``$(…)``, ``<(…)``, ``>(…)`` or a command
        in backquotes. A ``$`` that begins none of these is appended as text.

        quoted: whether the expansion stands within double quotes.
        """
        script, at = self.script, self.at
        opened = script[at : at + 2]
        if script.startswith("$((", at) and (end := closing(script, at + 3, "))")) >= 0:
            kind, text, end = "arithmetic", script[at + 3 : end], end + 2
        elif opened in ("${", "$(", "<(", ">("):
            end = closing(script, at + 2, "}" if opened == "${" else ")")
            if end < 0:
                self.refuse_open(at)
            kind, text, end = "parameter" if opened == "${" else "command", script[at + 2 : end], end + 1
        elif script[at] == "`":
            end = script.find("`", at + 1)
            if end < 0:
                raise self.fail(script[at : at + 40])
            kind, text, end = "command", script[at + 1 : end], end + 1
        elif found := _PARAMETER.match(script, at + 1):
            kind, text, end = "parameter", found[0], found.end()
        else:
            return self.text(pieces, "$", 1, quoted=quoted)
        self.at = end
        pieces.append(Piece(kind, text, quoted))

    def refuse_open(self, at: int) -> None:
        rest = self.script[at:]
        raise TooLong(f"a word, {quoted(rest, 40)},") if len(rest) > MOST_WORD else self.fail(rest[:40])

"""The parser of a script's tokens into statements: commands, lists, branches, loops and functions.

Nothing is expanded or executed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.commands.translate.shell.words import REDIRECTIONS, Piece, ScriptError, Token, tokens_of
from megatron_rl.errors import quoted

MOST_NESTED = 50  # statements within one another
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Holds an assignment: ``name=value``, ``name+=value``, ``name[index]=value`` or ``name=(items)``.

    appends: whether the operator is ``+=``.
    items: the elements of an array; None for a single value.
    source: the assignment as it stands in the script.
    """

    name: str
    appends: bool
    value: tuple[Piece, ...]
    items: tuple[Token, ...] | None = None
    index: str | None = None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Holds a simple command; one without words only sets the variables in ``assignments``."""

    assignments: tuple[Assignment, ...]
    words: tuple[Token, ...]
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """Holds the words and operators of a condition ``[[ … ]]``."""

    tokens: tuple[Token, ...]
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Calculation:
    """Holds the text of an arithmetic statement ``((…))``."""

    text: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Holds statements joined by ``&&``, ``||`` or a pipe.

    parts: a pair (operator before the statement, statement) for each; the first operator is "".
    """

    parts: tuple[tuple[str, Statement], ...]
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Negated:
    statement: Statement
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Holds the statements of ``{ …; }`` or ``( … )``.

    own_variables: True for ``( … )``, whose changes of variables are undone at its end.
    """

    body: Body
    own_variables: bool
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class If:
    """Holds an ``if`` statement.

    branches: (condition, statements) in order; the condition of ``else`` is None.
    sources: the conditions as they stand in the script.
    """

    branches: tuple[tuple[Body | None, Body], ...]
    sources: tuple[str, ...]
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    word: Token
    branches: tuple[tuple[tuple[Token, ...], Body], ...]
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Holds a loop.

    name: the variable of a loop ``for name``; "" for any other loop.
    words: the words after ``in``; None for any other loop.
    source: the head of the loop, as it stands in the script.
    """

    name: str
    words: tuple[Token, ...] | None
    body: Body
    source: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    name: str
    body: Body
    line: int


Statement = Command | Test | Calculation | Chain | Negated | Group | If | Case | Loop | Function
Body = tuple[Statement, ...]


def statements_of(script: str) -> Body:
    """Return the statements of a script; raise ScriptError if a part of it is no bash or is not supported."""
    parser = _Parser(tokens_of(script))
    body = parser.body(())
    if parser.token.kind != "end":
        raise parser.unexpected()
    return body


def declared(token: Token) -> Assignment | None:
    """Return the assignment in an argument of ``export`` or ``declare``.

    Returns None if the argument is an option or a name without ``=``.
    """
    found = _ASSIGNMENT.match(token.text) if token.kind in ("word", "array") else None
    return _assignment(token, found) if found else None


def source_of(tokens: Sequence[Token]) -> str:
    return " ".join(token.text for token in tokens if token.text != "\n")


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def unexpected(self) -> ScriptError:
        token = self.token
        what = "the script's end" if token.kind == "end" else quoted(token.text, 40)
        return ScriptError(
            token.line, f"{what} is not expected there; write the settings in a YAML, or the script more plainly"
        )

    def take(self) -> Token:
        self.at += 1
        return self.tokens[self.at - 1]

    def is_word(self, *texts: str) -> bool:
        return self.token.kind == "word" and self.token.text in texts

    def is_operator(self, *texts: str) -> bool:
        return self.token.kind == "operator" and self.token.text in texts

    def expect(self, text: str) -> Token:
        if self.token.kind == "end" or self.token.text != text:
            raise self.unexpected()
        return self.take()

    def skip_lines(self) -> None:
        while self.is_operator("\n"):
            self.take()

    def body(self, ends: Sequence[str]) -> Body:
        """Return the next statements, up to ``)``, ``;;``, the script's end, or a word in ``ends`` such as ``fi``."""
        statements: list[Statement] = []
        while True:
            while self.is_operator("\n", ";", "&"):
                self.take()
            if self.token.kind == "end" or self.is_word(*ends) or self.is_operator(")", ";;", ";&", ";;&"):
                return tuple(statements)
            statements.append(self.chain())

    def chain(self) -> Statement:
        line, parts = self.token.line, [("", self.piped())]
        while self.is_operator("&&", "||"):
            operator = self.take().text
            self.skip_lines()
            parts.append((operator, self.piped()))
        return parts[0][1] if len(parts) == 1 else Chain(parts=tuple(parts), line=line)

    def piped(self) -> Statement:
        line, negations = self.token.line, 0
        while self.is_word("!"):
            self.take()
            negations += 1
        parts = [("", self.statement())]
        while self.is_operator("|", "|&"):
            self.take()
            self.skip_lines()
            parts.append(("|", self.statement()))
        found = parts[0][1] if len(parts) == 1 else Chain(parts=tuple(parts), line=line)
        return Negated(statement=found, line=line) if negations % 2 else found

    def statement(self) -> Statement:
        self.depth += 1
        if self.depth > MOST_NESTED:
            raise ScriptError(self.token.line, f"statements stand more than {MOST_NESTED} deep; write it more plainly")
        line = self.token.line
        match self.token.text if self.token.kind == "word" else self.token.kind:
            case "if":
                statement = self.conditional()
            case "case":
                statement = self.case()
            case "for" | "select" | "while" | "until":
                statement = self.loop()
            case "{":
                statement = self.group("{", "}")
            case "[[":
                statement = self.test()
            case "function":
                self.take()
                statement = self.function()
            case "arithmetic":
                statement = Calculation(text=self.take().text, line=line)
            case "operator" if self.is_operator("("):
                statement = self.group("(", ")")
            case _ if self.token.kind == "word" and self.tokens[self.at + 1].text == "(":
                statement = self.function()
            case _:
                statement = self.command()
        if not isinstance(statement, Command):
            self.redirections()
        self.depth -= 1
        return statement

    def redirections(self) -> None:
        while self.token.kind == "operator" and self.token.text in REDIRECTIONS:
            self.take()
            if self.token.kind != "word":
                raise self.unexpected()
            self.take()

    def command(self) -> Command:
        line, assignments, words = self.token.line, [], []
        start = self.at
        while True:
            self.redirections()
            token = self.token
            found = _ASSIGNMENT.match(token.text) if token.kind in ("word", "array") else None
            if found and not words:
                assignments.append(_assignment(self.take(), found))
            elif token.kind == "word" or (token.kind == "array" and words):
                words.append(self.take())
            else:
                break
        if self.at == start:
            raise self.unexpected()
        return Command(assignments=tuple(assignments), words=tuple(words), line=line)

    def group(self, opener: str, closer: str) -> Group:
        line = self.expect(opener).line
        body = self.body((closer,) if closer == "}" else ())
        self.expect(closer)
        return Group(body=body, own_variables=opener == "(", line=line)

    def test(self) -> Test:
        line, tokens = self.expect("[[").line, []
        while not self.is_word("]]"):
            if self.token.kind == "end":
                raise self.unexpected()
            tokens.append(self.take())
        self.take()
        return Test(tokens=tuple(tokens), line=line)

    def conditional(self) -> If:
        line, branches, sources = self.token.line, [], []
        while self.is_word("if", "elif"):
            self.take()
            start = self.at
            condition = self.body(("then",))
            sources.append(source_of(self.tokens[start : self.at]).removesuffix(";").strip())
            self.expect("then")
            branches.append((condition, self.body(("elif", "else", "fi"))))
        if self.is_word("else"):
            self.take()
            branches.append((None, self.body(("fi",))))
        self.expect("fi")
        return If(branches=tuple(branches), sources=tuple(sources), line=line)

    def case(self) -> Case:
        line, word = self.take().line, self.take()
        self.skip_lines()
        self.expect("in")
        self.skip_lines()
        branches = []
        while not self.is_word("esac"):
            if self.is_operator("("):
                self.take()
            patterns = []
            while not self.is_operator(")"):
                if self.token.kind == "word":
                    patterns.append(self.take())
                else:
                    self.expect("|")
            self.take()
            branches.append((tuple(patterns), self.body(("esac",))))
            while self.is_operator(";;", ";&", ";;&", "\n"):
                self.take()
        self.take()
        return Case(word=word, branches=tuple(branches), line=line)

    def loop(self) -> Loop:
        start, kind = self.at, self.take()
        words: list[Token] | None = None
        name = ""
        if kind.text == "for" and self.token.kind == "word":
            name = self.take().text
            self.skip_lines()
            words = []
            if self.is_word("in"):
                self.take()
                while self.token.kind == "word":
                    words.append(self.take())
        elif kind.text == "for":
            if self.token.kind != "arithmetic":
                raise self.unexpected()
            self.take()
        self.body(("do", "{"))
        source = source_of(self.tokens[start : self.at]).removesuffix(";").strip()
        if not self.is_word("do", "{"):
            raise self.unexpected()
        closer = "done" if self.take().text == "do" else "}"
        body = self.body((closer,))
        self.expect(closer)
        is_list = words is not None and kind.text == "for"
        return Loop(name=name, words=tuple(words) if is_list else None, body=body, source=source, line=kind.line)

    def function(self) -> Function:
        line, name = self.token.line, self.take().text
        if self.is_operator("("):
            self.take()
            self.expect(")")
        self.skip_lines()
        body = self.statement()
        return Function(name=name, body=(body,), line=line)


def _assignment(token: Token, match: re.Match[str]) -> Assignment:
    length, pieces = match.end(), list(token.pieces)
    if token.kind == "array":
        return Assignment(
            name=match[1],
            appends=bool(match[3]),
            value=(),
            items=token.items,
            source=f"{token.text}({source_of(token.items)})",
        )
    while length and pieces and pieces[0].kind == "text" and not pieces[0].quoted:  # the text up to the =
        rest = pieces[0].text[length:]
        length -= min(length, len(pieces[0].text))
        pieces = [Piece("text", rest, False), *pieces[1:]] if rest else pieces[1:]
    return Assignment(
        name=match[1],
        appends=bool(match[3]),
        value=tuple(pieces),
        index=match[2][1:-1] if match[2] else None,
        source=token.text,
    )

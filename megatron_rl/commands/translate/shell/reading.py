"""The reading of a script statement by statement: it tracks variables and decides conditions, but runs no program.

A branch is read if its condition is known to hold. If it is not known whether the condition holds,
the branch is skipped, and its settings are recorded in a ``Branch``. If one of several skipped
branches must run, as in ``if … else``, a variable that all of them change becomes unknown. Any other
variable that has a value keeps it, as if no skipped branch changed it. Every program is assumed to
succeed.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.commands.translate.shell import statements as made
from megatron_rl.commands.translate.shell.conditions import Term, decided, matches
from megatron_rl.commands.translate.shell.effects import DECLARES, READS, effects_of, names_set
from megatron_rl.commands.translate.shell.expansion import (
    MOST_FIELDS,
    Expander,
    Value,
    Variables,
    path_of,
    unknown,
)
from megatron_rl.commands.translate.shell.words import ScriptError, Token, TooLong

MOST_STEPS = 20_000  # the most statements that are followed
MOST_CALLS = 20  # the most function calls within one another


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Names a branch that was not read, since it is not known whether its condition holds.

    condition: the condition, as it stands in the script.
    line: the line of the statement that has the branch.
    holds: the settings (``a.b=value``, ``--name=value``) and assignments in the branch, as they
        stand in the script.
    """

    condition: str
    line: int
    holds: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Holds the expanded command line of a program that the script starts, and its line in the script."""

    words: tuple[Value, ...]
    line: int


@dataclass(slots=True, kw_only=True)
class Script:
    """Holds the programs that a script starts, in order, and the branches and commands that were not read.

    unread: the commands ``source``, ``.`` and ``eval``, which may set variables.
    """

    calls: list[Call] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)  # ``source env.sh`` and ``eval``, in their source form


class _Status(enum.Enum):
    YES, NO, UNKNOWN, PROGRAM = range(4)


class _End(Exception):
    """Stops the reading of the script, raised at ``exit``; the subclasses stop a function or a loop."""


class _Return(_End): ...


class _Break(_End): ...


def read_script(text: str, path: str, values: Mapping[str, str]) -> Script:
    """Return a Script: the programs that a script starts, and the parts of it that were not read.

    text: the script.
    path: the script's path, for ``$0``.
    values: {name: value} of variables; the script's arguments are named "1", "2" and so on.

    Raises ScriptError for a script that cannot be read, and TooLong if a value grows beyond its
    limit.
    """
    variables = Variables(positions={name: Value(value) for name, value in values.items() if name.isdigit()})
    fixed = {"HOME": os.path.expanduser("~"), "PWD": os.getcwd(), "0": path, "BASH_SOURCE": path}
    variables.values |= {
        name: Value(value) for name, value in (fixed | dict(values)).items() if name not in "123456789"
    }
    reader = _Reader(variables)
    with contextlib.suppress(_End):
        reader.body(made.statements_of(text))
    return reader.script


class _Reader:
    def __init__(self, variables: Variables) -> None:
        self.variables, self.script = variables, Script()
        self.expander = Expander(variables, self.output_of)
        self.functions: dict[str, made.Function] = {}
        self.steps = self.calls = 0

    def body(self, body: made.Body) -> _Status:
        status = _Status.YES
        for statement in body:
            status = self.follow(statement)
        return status

    def follow(self, statement: made.Statement) -> _Status:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise ScriptError(statement.line, f"more than {MOST_STEPS} statements are followed up to here; shorten it")
        match statement:
            case made.Command():
                return self.command(statement)
            case made.Chain():
                return self.chain(statement)
            case made.If():
                return self.conditional(statement)
            case made.Case():
                return self.case(statement)
            case made.Loop():
                return self.loop(statement)
            case made.Test():
                return _status(decided([self.term(token) for token in statement.tokens]))
            case made.Calculation():
                return self.calculation(statement)
            case made.Negated():
                status = self.follow(statement.statement)
                other = {_Status.YES: _Status.NO, _Status.NO: _Status.YES}
                return other.get(status, _Status.UNKNOWN)
            case made.Group():
                return self.group(statement)
            case made.Function():
                self.functions[statement.name] = statement
        return _Status.YES

    def group(self, group: made.Group) -> _Status:
        if not group.own_variables:
            return self.body(group.body)
        before = dict(self.variables.values)
        try:
            return self.body(group.body)
        except _End:
            return _Status.PROGRAM
        finally:
            self.variables.values = before

    def calculation(self, statement: made.Calculation) -> _Status:
        for name in names_set((statement,)):
            self.variables.values[name] = unknown(f"(({statement.text}))")
        value = self.expander.arithmetic(statement.text, f"(({statement.text}))")
        return _Status.UNKNOWN if value.depends else _status(int(value.text) != 0)

    def term(self, token: Token) -> Term:
        unquoted = all(piece.kind == "text" and not piece.quoted for piece in token.pieces)
        if token.kind == "operator":
            return Term(value=Value(token.text), pattern=Value(token.text), operator=True)
        single, pattern = self.expander.single(token.pieces), self.expander.pattern(token.pieces)
        return Term(value=single, pattern=pattern, operator=unquoted)

    def chain(self, chain: made.Chain) -> _Status:
        status = _Status.YES
        for i, (operator, statement) in enumerate(chain.parts):
            taken = operator in ("", "|") or status == (_Status.NO if operator == "||" else _Status.YES)
            if taken or (operator == "&&" and status == _Status.PROGRAM):
                status = self.follow(statement)
            elif status in (_Status.UNKNOWN, _Status.PROGRAM):
                before = " ".join(f"{sign} {_shown(part)}".strip() for sign, part in chain.parts[:i])
                self.leave(before, statement.line, [(statement,)], exhaustive=False)
        return status

    def conditional(self, statement: made.If) -> _Status:
        for i, (condition, body) in enumerate(statement.branches):
            status = _Status.YES if condition is None else self.body(condition)
            if status == _Status.YES:
                return self.body(body)
            if status != _Status.NO:
                bodies = [each for _, each in statement.branches[i:]]
                exhaustive = statement.branches[-1][0] is None
                self.leave(statement.sources[i], statement.line, bodies, exhaustive=exhaustive)
                return _Status.UNKNOWN
        return _Status.YES

    def case(self, statement: made.Case) -> _Status:
        word = self.expander.single(statement.word.pieces)
        for i, (patterns, body) in enumerate(statement.branches):
            found = [matches(word, self.expander.pattern(each.pieces)) for each in patterns]
            if True in found:
                return self.body(body)
            if None in found:
                rest = statement.branches[i:]
                exhaustive = any(each.text == "*" for patterns, _ in rest for each in patterns)
                source = f"case {statement.word.text}"
                self.leave(source, statement.line, [body for _, body in rest], exhaustive=exhaustive)
                return _Status.UNKNOWN
        return _Status.YES

    def loop(self, statement: made.Loop) -> _Status:
        values = [each for word in statement.words or () for each in self.expander.fields(word.pieces)]
        if statement.words is None or any(value.depends for value in values):
            self.leave(statement.source, statement.line, [statement.body], exhaustive=False)
            return _Status.UNKNOWN
        for value in values:
            self.variables.values[statement.name] = value
            try:
                self.body(statement.body)
            except _Break:
                break
        return _Status.YES

    def leave(self, condition: str, line: int, bodies: Sequence[made.Body], *, exhaustive: bool) -> None:
        """Record branches that are not read, and mark the variables that become unknown thereby.

        condition: the condition, as it stands in the script; it is not known whether it holds.
        bodies: the statements of each branch.
        exhaustive: True if one of the branches must run, as with ``else``. Then each variable that
            all of them change becomes unknown. If False, perhaps none runs. Then a variable that a
            branch changes keeps the value that it has, and becomes unknown if it has none.

        An unknown variable is marked as depending on ``condition``. All others keep their values, as
        if no branch ran.
        """
        holds = tuple(dict.fromkeys(each for body in bodies for each in effects_of(body)))
        if holds:
            self.script.branches.append(Branch(condition=condition, line=line, holds=holds))
        names = [names_set(body) for body in bodies]
        changed = set.intersection(*names) if exhaustive else set.union(*names)
        for name in changed:
            if exhaustive or self.variables.of(name) is None:
                self.variables.values[name] = Value(f"${name}", (condition,))

    def assign(self, assignment: made.Assignment) -> None:
        values = self.variables.values
        if assignment.items is not None:
            items = [value for item in assignment.items for value in self.expander.fields(item.pieces)]
            held = values.get(assignment.name)
            before = [] if held is None or not assignment.appends else held if isinstance(held, list) else [held]
            if len(before) + len(items) > MOST_FIELDS:
                raise TooLong(f"an array, {assignment.name},")
            values[assignment.name] = [*before, *items]
            return
        value = self.expander.single(assignment.value)
        if assignment.index is not None:
            values[assignment.name] = unknown(f"${{{assignment.name}[{assignment.index}]}}")
            return
        held = values.get(assignment.name)
        if assignment.appends and isinstance(held, list):
            values[assignment.name] = [(held[0] if held else Value("")) + value, *held[1:]]
            return
        if assignment.appends:
            unset = Value("") if assignment.name in values else unknown(f"${assignment.name}")
            value = (unset if held is None else held) + value
        values[assignment.name] = value

    def command(self, command: made.Command) -> _Status:
        # A command without words only sets variables.
        if not command.words:
            for assignment in command.assignments:
                self.assign(assignment)
            return _Status.YES
        first = command.words[0].text
        if first in DECLARES:
            return self.declare(command.words[1:])
        words = [value for token in command.words for value in self.expander.fields(token.pieces)]
        if not words:
            return _Status.YES
        name = words[0].text
        # Words of bash itself.
        match name:
            case "exit" | "exec" if name == "exit" or len(words) == 1:
                raise _End
            case "return":
                raise _Return
            case "break":
                raise _Break
            case "true" | ":" | "set" | "shopt" | "ulimit" | "trap" | "echo" | "cd" | "wait" | "sleep":
                return _Status.YES if name in ("true", ":") else _Status.PROGRAM
            case "false":
                return _Status.NO
            case "shift":
                self.shift(words[1:])
                return _Status.PROGRAM
            case "[" | "test":
                tokens = command.words[1:-1] if name == "[" else command.words[1:]
                return _status(decided(self.terms(tokens)))
            case "source" | "." | "eval":
                self.script.unread.append(" ".join(value.text for value in words))
                return _Status.PROGRAM
        # Functions of the script, then programs.
        if name in self.functions:
            return self.call(self.functions[name], words[1:])
        if name in READS:
            for changed in names_set((command,)):
                self.variables.values[changed] = None if name == "unset" else unknown(f"{name} {changed}")
            return _Status.PROGRAM
        self.script.calls.append(Call(words=tuple(words[name == "exec" :]), line=command.line))
        if name == "exec":
            raise _End
        return _Status.PROGRAM

    def shift(self, words: Sequence[Value]) -> None:
        variables, by = self.variables, 1
        if words and words[0].text.isdigit():
            by = int(words[0].text)
        moved = {int(name) - by: value for name, value in variables.positions.items()}
        variables.positions = {str(place): value for place, value in moved.items() if place > 0}
        if variables.num_positions is not None:
            variables.num_positions = max(0, variables.num_positions - by)

    def terms(self, tokens: Sequence[Token]) -> list[Term]:
        """Return the Terms of a condition ``[ … ]``, expanded as the words of a command are.

        One unquoted variable may become several Terms. ``*`` and ``?`` are no wildcards here.
        """
        terms = []
        for token in tokens:
            plain = all(piece.kind == "text" for piece in token.pieces)
            for value in self.expander.fields(token.pieces):
                literal = Value("".join(f"[{c}]" if c in "*?[" else c for c in value.text), value.depends)
                terms.append(Term(value=value, pattern=literal, operator=plain))
        return terms

    def declare(self, words: Sequence[Token]) -> _Status:
        for assignment in filter(None, map(made.declared, words)):
            self.assign(assignment)
        return _Status.YES

    def call(self, function: made.Function, arguments: Sequence[Value]) -> _Status:
        variables = self.variables
        before = variables.positions, variables.num_positions
        variables.positions = {str(i): value for i, value in enumerate(arguments, 1)}
        variables.num_positions = len(arguments)
        self.calls += 1
        try:
            if self.calls > MOST_CALLS:
                raise ScriptError(function.line, f"{function.name}() calls itself; write the command out")
            return self.body(function.body)
        except _Return:
            return _Status.PROGRAM
        finally:
            self.calls -= 1
            variables.positions, variables.num_positions = before

    def output_of(self, text: str) -> Value | None:
        """Return the output of the command in ``$(…)``; None if it is not known.

        Known are ``echo``, ``pwd``, ``cd … && pwd``, ``dirname``, ``basename`` and ``realpath``.
        """
        try:
            body = made.statements_of(text)
        except ScriptError:
            return None
        here = self.variables.of("PWD")
        if not isinstance(here, Value) or len(body) != 1:
            return None
        if isinstance(body[0], made.Chain) and [operator for operator, _ in body[0].parts] == ["", "&&"]:
            (_, first), (_, second) = body[0].parts
            went, then = self._words(first), self._words(second)
            if len(went) == 2 and went[0].text == "cd" and [each.text for each in then] == ["pwd"]:
                return Value(path_of("cd", went[1].text, here.text) or "", went[1].depends)
            return None
        words = self._words(body[0])
        match [each.text for each in words]:
            case ["pwd"]:
                return here
            case ["echo", *texts] if texts[:1] != ["-e"]:
                texts = texts[1:] if texts[:1] == ["-n"] else texts
                return Value(" ".join(texts), tuple(each for word in words for each in word.depends))
            case ["dirname" | "basename" | "realpath" as program, _]:
                return Value(path_of(program, words[1].text, here.text) or "", words[1].depends)
        return None

    def _words(self, statement: made.Statement) -> list[Value]:
        if not isinstance(statement, made.Command) or statement.assignments:
            return []
        return [value for token in statement.words for value in self.expander.fields(token.pieces)]


def _status(found: bool | None) -> _Status:
    return _Status.UNKNOWN if found is None else _Status.YES if found else _Status.NO


def _shown(statement: made.Statement) -> str:
    match statement:
        case made.Command():
            return made.source_of(statement.words)
        case made.Test():
            return f"[[ {made.source_of(statement.tokens)} ]]"
        case made.Calculation():
            return f"(({statement.text}))"
        case made.Negated():
            return f"! {_shown(statement.statement)}"
    return "…"

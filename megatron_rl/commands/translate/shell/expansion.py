"""The expansion of words as bash does it: variables, defaults, arithmetic, arrays and word splitting.

An expansion whose value is not known stays in the text as it stands in the script. A variable that
the script never sets may come from the environment, so its value is not known. Nevertheless
``${name:-default}`` of such a variable is the default. HOME and PWD are known. No file is read.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_rl.commands.translate.shell.arithmetic import NotComputed, computed, number
from megatron_rl.commands.translate.shell.words import MOST_WORD, Piece, TooLong, word_of
from megatron_rl.errors import quoted

MOST_DEEP = 30  # the most expansions within one another
MOST_FIELDS = 10_000  # the most fields of a command or an array
MOST_MATCHED = 256  # the most characters that a pattern is matched against
_INSIDE = re.compile(r"(\w+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_DEFAULTS = (":-", ":=", ":+", ":?", "-", "=", "+", "?")
_BRACES = re.compile(r"\{([^{},]*(?:,[^{},]*)+)\}")


@dataclass(frozen=True, slots=True)
class Value:
    """Holds an expanded text, and the expansions in it whose values are not known.

    depends: those expansions, as they stand unexpanded in the text; () if the text is known.

    Example: ``run-$(date)`` is Value("run-$(date)", ("$(date)",)).
    """

    text: str
    depends: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.text) > MOST_WORD:
            raise TooLong(f"a word, {quoted(self.text, 40)},")

    def __add__(self, other: Value) -> Value:
        return Value(self.text + other.text, self.depends + other.depends)


Held = Value | list[Value]


def unknown(source: str) -> Value:
    return Value(source, (source,))


@dataclass(slots=True)
class Variables:
    """Holds the variables and arguments that are known while a script is read.

    values: {variable: its Value, a list of Values for an array, or None after ``unset``}.
    positions: the arguments ``$1``, ``$2``, … by number.
    num_positions: the number of arguments, ``$#``; None if it is not known.
    """

    values: dict[str, Held | None] = field(default_factory=dict)  # None: unset by the script
    positions: dict[str, Value] = field(default_factory=dict)
    num_positions: int | None = None

    def of(self, name: str) -> Held | None:
        """Return the value of the variable or argument ``name``; None if it is not known or is unset."""
        return self.positions.get(name) if name.isdigit() and name != "0" else self.values.get(name)

    def is_unset_here(self, name: str) -> bool:
        """Return True if a variable or argument surely has no value: the script unset it, or got fewer arguments.

        Returns False for a variable that the script never sets, since the environment may set it.
        """
        if name.isdigit() and name != "0":
            return self.num_positions is not None and name not in self.positions
        return name in self.values and self.values[name] is None


@dataclass(slots=True)
class Expander:
    """Expands the words of one script.

    variables: the known variables, which ``${name:=word}`` changes.
    substitute: a function that takes the command in ``$(…)`` and returns its output; None if that
        is not known.
    depth: the number of nested expansions at the moment.
    """

    variables: Variables
    substitute: Callable[[str], Value | None]
    depth: int = 0

    def single(self, word: Sequence[Piece]) -> Value:
        """Return a word's expansion as one text, without word splitting, as in an assignment."""
        whole = Value("")
        for i, piece in enumerate(word):
            held = self.piece(piece, begins=i == 0)
            whole += held if isinstance(held, Value) else joined(held)
        return whole

    def pattern(self, word: Sequence[Piece]) -> Value:
        """Return a word's expansion as a pattern of ``fnmatch``, in which quoted wildcards match only themselves."""
        whole = Value("")
        for piece in word:
            value = self.single([piece])
            escaped = re.sub(r"([*?[])", r"[\1]", value.text) if piece.quoted else value.text
            whole += Value(escaped, value.depends)
        return whole

    def fields(self, word: Sequence[Piece]) -> list[Value]:
        """Return the fields that a word expands to, after brace expansion and word splitting.

        An unquoted empty expansion gives no field, and ``"${a[@]}"`` gives one for each element.
        """
        done: list[Value] = []
        for alternative in _without_braces(tuple(word)):
            current: Value | None = None
            for i, piece in enumerate(alternative):
                held = self.piece(piece, begins=i == 0)
                splits = not piece.quoted and piece.kind != "text"
                parts = held if isinstance(held, list) else [held]
                for j, part in enumerate(parts):
                    if j:
                        done += [current] if current is not None else []
                        current = None
                    if not splits or part.depends:
                        current = (current or Value("")) + part
                        continue
                    *ended, current = _split(current, part.text)
                    done += ended
            done += [current] if current is not None else []
            if len(done) > MOST_FIELDS:
                raise TooLong(f"a list of {len(done)} words, {quoted(done[0].text, 40)} first,")
        return done

    def piece(self, piece: Piece, *, begins: bool) -> Held:
        self.depth += 1
        if self.depth > MOST_DEEP:
            raise TooLong(f"expansions within one another, {quoted(piece.source, 40)},")
        try:
            match piece.kind:
                case "parameter":
                    return self.parameter(piece)
                case "arithmetic":
                    return self.arithmetic(piece.text, piece.source)
                case "command":
                    found = self.substitute(piece.text)
                    return unknown(piece.source) if found is None else found
            if begins and not piece.quoted and re.match(r"~(/|$)", piece.text):
                home = self.variables.of("HOME")
                return (home if isinstance(home, Value) else unknown("~")) + Value(piece.text[1:])
            return Value(piece.text)
        finally:
            self.depth -= 1

    def arithmetic(self, text: str, source: str) -> Value:
        """Return the value of the arithmetic expansion ``$((text))``; ``source`` as text if it is not known.

        source: the expansion as it stands in the script.
        """
        expanded = self.single(word_of(text, quoted=True))
        if expanded.depends:
            return Value(source, expanded.depends)
        depends: list[str] = []
        try:
            return Value(str(computed(expanded.text, lambda name: self._number_of(name, depends))))
        except NotComputed:
            return Value(source, tuple(depends) or (source,))

    def _number_of(self, name: str, depends: list[str]) -> int:
        held = self.variables.of(name)
        value = held[0] if isinstance(held, list) and held else held
        if value is None and self.variables.is_unset_here(name):
            return 0
        if not isinstance(value, Value) or value.depends:
            depends += value.depends if isinstance(value, Value) else [f"${name}"]
            raise NotComputed(name)
        if not value.text.strip():
            return 0
        self.depth += 1
        try:
            if self.depth > MOST_DEEP:
                raise NotComputed(name)
            if re.fullmatch(r"\s*[-+]?\w+\s*", value.text) and value.text.strip(" +-")[:1].isdigit():
                return number(value.text)
            return computed(value.text, lambda other: self._number_of(other, depends))
        finally:
            self.depth -= 1

    def parameter(self, piece: Piece) -> Held:
        """Return the value of ``${…}`` with its operator applied; a list for several elements of an array."""
        text = piece.text
        if len(text) > 1 and text[0] == "#":
            return self._length(piece)
        found = _INSIDE.fullmatch(text)
        if not found:
            return unknown(piece.source)
        name, index, rest = found[1], found[2], found[3]
        held = self._held(name, index, piece)
        is_set = held is not None
        operator = next((each for each in _DEFAULTS if rest.startswith(each)), None)
        if operator is not None:
            return self._default(piece, held, operator, rest[len(operator) :])
        if not is_set:
            if self.variables.is_unset_here(name):
                return Value("")
            return unknown(piece.source)
        if not rest:
            return held
        if isinstance(held, list) and rest[0] == ":":
            places = [self.arithmetic(each, piece.source) for each in rest[1:].split(":")]
            if any(place.depends for place in places) or len(places) > 2:
                return unknown(piece.source)
            start, *length = (int(place.text) for place in places)
            return held[start:] if not length else held[start:][: length[0]]
        if isinstance(held, list):
            return [self._changed(value, rest, piece) for value in held]
        return self._changed(held, rest, piece)

    def _held(self, name: str, index: str | None, piece: Piece) -> Held | None:
        """Return the value of a parameter, no operator applied; None if it is unset or not known.

        name: the variable, an argument's number, ``@``, ``*`` or ``#``.
        index: the text in ``[…]``; None without one.
        piece: the whole expansion.
        """
        variables = self.variables
        if name in ("@", "*"):
            positions = [variables.positions[key] for key in sorted(variables.positions, key=int)]
            return positions if name == "@" or not piece.quoted else joined(positions)
        if name == "#":
            return None if variables.num_positions is None else Value(str(variables.num_positions))
        held = variables.of(name)
        if held is None or index is None:
            return (held[0] if held else None) if isinstance(held, list) else held
        items = held if isinstance(held, list) else [held]
        if index in ("@", "*"):
            return items if index == "@" or not piece.quoted else joined(items)
        at = self.arithmetic(index, piece.source)
        if at.depends:
            return Value(piece.source, at.depends)
        place = int(at.text)
        return items[place] if -len(items) <= place < len(items) else Value("")

    def _length(self, piece: Piece) -> Value:
        match = re.fullmatch(r"#(\w+|[@*])(?:\[([@*])\])?", piece.text)
        held = self._held(match[1], match[2], Piece("parameter", piece.text, False)) if match else None
        if held is None or (isinstance(held, Value) and held.depends):
            return unknown(piece.source)
        if match[1] in ("@", "*") and self.variables.num_positions is None:
            return unknown(piece.source)
        return Value(str(len(held if isinstance(held, list) else held.text)))

    def _default(self, piece: Piece, held: Held | None, operator: str, word: str) -> Held:
        value = joined(held) if isinstance(held, list) else held
        if value is not None and value.depends:
            return held if operator[-1] != "+" else Value(piece.source, value.depends)
        is_there = value is not None and (bool(value.text) or operator[0] != ":")
        if operator[-1] == "+":
            return self.single(word_of(word, piece.quoted)) if is_there else Value("")
        if is_there:
            return held if held is not None else Value("")
        if operator[-1] == "?":
            return unknown(piece.source)
        found = self.single(word_of(word, piece.quoted))
        if operator[-1] == "=":
            self.variables.values[re.match(r"\w*", piece.text)[0]] = found
        return found

    def _changed(self, value: Value, rest: str, piece: Piece) -> Value:
        """Return a variable's value with the operator of its ``${…}`` applied.

        The operators remove a prefix or suffix, change case, replace a part, or take a substring.

        rest: the operator and its argument, as ``%.txt`` in ``${name%.txt}``.
        piece: the whole expansion.
        """
        if value.depends or len(value.text) > MOST_MATCHED:
            return Value(piece.source, value.depends or (piece.source,))
        text = value.text
        if rest in ("^^", ",,", "^", ","):
            changed = text.upper() if rest[0] == "^" else text.lower()
            return Value(changed if len(rest) == 2 else changed[:1] + text[1:])
        if rest[0] == ":":
            return self._slice(text, rest[1:], piece)
        operator = re.match(r"##|#|%%|%|//|/#|/%|/", rest)
        if not operator:
            return unknown(piece.source)
        argument, _, replacement = rest[operator.end() :].partition("/")
        if operator[0][0] != "/":
            argument, replacement = rest[operator.end() :], ""
        pattern, new = self.pattern(word_of(argument, False)), self.single(word_of(replacement, False))
        if pattern.depends or new.depends:
            return Value(piece.source, pattern.depends + new.depends)
        return Value(_replaced(text, operator[0], pattern.text, new.text))

    def _slice(self, text: str, bounds: str, piece: Piece) -> Value:
        numbers = [self.arithmetic(each, piece.source) for each in bounds.split(":")]
        if len(numbers) > 2 or any(each.depends for each in numbers):
            return unknown(piece.source)
        start, *length = (int(each.text) for each in numbers)
        start = max(0, len(text) + start) if start < 0 else start
        if not length:
            return Value(text[start:])
        return Value(text[start : start + length[0]] if length[0] >= 0 else text[start : len(text) + length[0]])


def joined(values: Sequence[Value]) -> Value:
    return functools.reduce(lambda a, b: a + Value(" ") + b, values) if values else Value("")


def _split(current: Value | None, text: str) -> list[Value | None]:
    """Append ``text`` to the unfinished word ``current``, split at the white space of ``text``; return the words.

    current: the unfinished word, which ends where ``text`` begins; None if no word has begun.

    The last element is again unfinished, or None if ``text`` ends in white space. Example: "a" and
    "b c" give ["ab", "c"], in which "c" may go on; "a" and "b " give ["ab", None].
    """
    parts = text.split()
    if not parts:
        return [current, None] if current is not None and text else [current]
    words: list[Value | None] = []
    if current is not None and text[0].isspace():
        words.append(current)
        current = None
    words.append((current or Value("")) + Value(parts[0]))
    words += map(Value, parts[1:])
    return [*words, None] if text[-1].isspace() else words


def _without_braces(word: tuple[Piece, ...]) -> list[tuple[Piece, ...]]:
    """Return the words that brace expansion makes of a word: ``a{b,c}`` becomes ``ab`` and ``ac``.

    Braces are expanded only if both lie in the same Piece of unquoted literal text.
    """
    done, waiting = [], [word]
    while waiting:
        each = waiting.pop(0)
        for i, piece in enumerate(each):
            found = _BRACES.search(piece.text) if piece.kind == "text" and not piece.quoted else None
            if found and len(waiting) + len(done) < MOST_DEEP:
                before, behind = piece.text[: found.start()], piece.text[found.end() :]
                middles = [Piece("text", before + part + behind, False) for part in found[1].split(",")]
                waiting = [(*each[:i], middle, *each[i + 1 :]) for middle in middles] + waiting
                break
        else:
            done.append(each)
    return done


def _replaced(text: str, operator: str, pattern: str, new: str) -> str:
    matches = functools.partial(re.match, fnmatch.translate(pattern))
    lengths = range(len(text) + 1)
    match operator:
        case "#" | "##" | "/#":
            longest = operator != "#"
            length = next((n for n in (reversed(lengths) if longest else lengths) if matches(text[:n])), None)
            return text if length is None else new + text[length:]
        case "%" | "%%" | "/%":
            longest = operator != "%"
            length = next((n for n in (lengths if longest else reversed(lengths)) if matches(text[n:])), None)
            return text if length is None else text[:length] + new
    done, at = "", 0
    while at < len(text):
        end = next((n for n in range(len(text), at, -1) if matches(text[at:n])), None)
        if end is None:
            done, at = done + text[at], at + 1
            continue
        done, at = done + new, end
        if operator == "/":
            break
    return done + text[at:]


def path_of(program: str, argument: str, folder: str) -> str | None:
    """Return the path that ``dirname``, ``basename`` or ``realpath`` prints, or the folder that ``cd`` enters.

    Returns None for any other program.

    program: the command's name.
    argument: the command's argument.
    folder: the working directory.
    """
    match program:
        case "dirname":
            return os.path.dirname(argument.rstrip("/")) or "."
        case "basename":
            return os.path.basename(argument.rstrip("/"))
        case "realpath" | "cd":
            return os.path.normpath(os.path.join(folder, argument))
    return None

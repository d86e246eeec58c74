"""Reads a Dockerfile: its instructions, stages, arguments and pip lines, and what a .dockerignore leaves to it."""

from __future__ import annotations

import fnmatch
import pathlib
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[1]
# What parts two commands of a shell line.
BETWEEN = {"&&", "||", ";", "|", "then", "else", "fi", "do", "done", "{", "}"}
VARIABLE = re.compile(r"^[A-Za-z_]\w*=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """Holds one instruction, its lines joined and comments dropped.

    word: FROM, RUN, ... in capitals. flags: what begins with --. rest: everything behind them.
    line: the number of its first line, from 1. stage: the number of its FROM, -1 before the first.
    """

    word: str
    flags: tuple[str, ...]
    rest: str
    line: int
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dockerfile:
    """Holds the instructions in their order; ``text`` is what was read."""

    text: str
    instructions: tuple[Instruction, ...]

    def of(self, *words: str) -> list[Instruction]:
        return [each for each in self.instructions if each.word in words]

    @property
    def last_stage(self) -> list[Instruction]:
        number = self.instructions[-1].stage
        return [each for each in self.instructions if each.stage == number]

    @property
    def defaults(self) -> dict[str, str]:
        """Return the default of each ARG, quotes taken off; "" where it has none."""
        pairs = (each.rest.partition("=") for each in self.of("ARG"))
        return {name: value.strip('"') for name, _, value in pairs}

    def filled(self, text: str) -> str:
        """Return the text with each ``${NAME}`` of an ARG replaced by its default."""
        return re.sub(r"\$\{(\w+)\}", lambda match: self.defaults.get(match[1], match[0]), text)


def read(text: str) -> Dockerfile:
    """Parse a Dockerfile without heredocs; raises ValueError for a line that is no instruction."""
    instructions, begun, first, stage = [], "", 0, -1
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("#") or (not begun and not line.strip()):
            continue
        first = first if begun else number
        begun += line.strip()
        if begun.endswith("\\"):
            begun = begun[:-1]
            continue
        match = re.fullmatch(r"([A-Z]+)((?:\s+--[\w-]+=\S+)*)\s+(.*)", begun)
        if match is None:
            raise ValueError(f"line {first} is no instruction: {begun!r}")
        stage += match[1] == "FROM"
        flags = tuple(match[2].split())
        instructions.append(Instruction(word=match[1], flags=flags, rest=match[3], line=first, stage=stage))
        begun = ""
    return Dockerfile(text=text, instructions=tuple(instructions))


def shell_commands(line: str) -> list[list[str]]:
    """Return the words of each simple command of a shell line, its variables before it left out.

    Example: ``A=1 pip install x && B=2 rm y`` gives ``[["pip", "install", "x"], ["rm", "y"]]``.
    """
    line = re.sub(r"(\w+=)\$\([^()]*(?:\([^()]*\)[^()]*)*\)", r"\1value", line)  # NAME=$(...)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in lexer:
        if word in BETWEEN:
            found.append([])
        elif found[-1] or not VARIABLE.match(word):
            found[-1].append(word)
    return [words for words in found if words]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipLine:
    """Holds one ``pip install`` or ``pip wheel``: its requirements, constraint and lock files, and flags."""

    verb: str
    requirements: tuple[str, ...]
    constraints: tuple[str, ...]
    locks: tuple[str, ...]
    flags: tuple[str, ...]


def pip_lines(run: Instruction) -> list[PipLine]:
    """Return the pip lines of a RUN, in their order."""
    found = []
    for words in shell_commands(run.rest):
        if words[:2] not in (["pip", "install"], ["pip", "wheel"]):
            continue
        given: dict[str, list[str]] = {"-c": [], "-r": [], "--extra-index-url": [], "--wheel-dir": []}
        requirements, flags, rest = [], [], iter(words[2:])
        for word in rest:
            if word in given:
                given[word].append(next(rest))
            else:
                (flags if word.startswith("-") else requirements).append(word)
        found.append(PipLine(
            verb=words[1], requirements=tuple(requirements), constraints=tuple(given["-c"]),
            locks=tuple(given["-r"]), flags=tuple(flags),
        ))  # fmt: skip
    return found


def apt_packages(file: Dockerfile) -> set[str]:
    """Return what the file's apt-get lines install, arguments filled in."""
    lines = (words for run in file.of("RUN") for words in shell_commands(run.rest))
    asked = (words[2:] for words in lines if words[:2] == ["apt-get", "install"])
    return {file.filled(word) for words in asked for word in words if not word.startswith("-")}


def kept(paths: Iterable[str], ignore: str) -> set[str]:
    """Return the paths that a .dockerignore leaves, by its last pattern that matches each path or a folder above it.

    Patterns as Docker reads them, of which these are known: a name from the root, ``*``, ``**/`` and
    ``!`` before one.
    """
    patterns = [line.strip() for line in ignore.split("\n") if line.strip() and not line.startswith("#")]
    left = set()
    for path in paths:
        parts = path.split("/")
        above = ["/".join(parts[: number + 1]) for number in range(len(parts))]
        keep = True
        for pattern in patterns:
            bare = pattern.removeprefix("!")
            anywhere = bare.removeprefix("**/")
            # without **/ a * stays within a folder
            names = [name.rpartition("/")[2] for name in above] if anywhere != bare else above
            level = [name for name in names if anywhere != bare or name.count("/") == bare.count("/")]
            if any(fnmatch.fnmatchcase(name, anywhere) for name in level):
                keep = pattern.startswith("!")
        if keep:
            left.add(path)
    return left

"""The evaluation of interpolations (``${...}`` in settings) by OmegaConf, ordered by dependencies and within limits.

All of OmegaConf's grammar is read (2.3, "Variable interpolation" and "Built-in resolvers"):
``${section.key}``, relative and nested keys, ``${oc.env:NAME,default}``, oc.select, oc.decode,
oc.create, oc.dict.keys, oc.dict.values, and resolvers that the process itself registered. Not read:
oc.coerce, which imports the module that it is given.

Each text with an interpolation gets a number. Until the text is evaluated, the marker
``${megatron_rl.pending:number}`` stands in its place. If OmegaConf meets another text's marker
during an evaluation, the other text is evaluated first, and the evaluation is repeated. So this
module sees every reference between texts. It raises ConfigError with the keys of a cycle, and if
texts, calls or values exceed the limits below.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator

from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import GrammarParseError, OmegaConfBaseException, UnsupportedInterpolationType

from megatron_rl.config.typed import escaped
from megatron_rl.errors import ConfigError, quoted, shortened

MOST_CHARACTERS = 100_000  # of one text
MOST_INTERPOLATIONS = 1_000  # in one configuration
MOST_CALLS = 1_000  # of resolvers, in one configuration
MOST_VALUES = 10_000  # that interpolations give, in one configuration
Path = tuple[str | int, ...]
_PENDING = "megatron_rl.pending"
_MARKER = re.compile(rf"\$\{{{re.escape(_PENDING)}:(\d+)\}}")
_PLAIN = re.compile(r"\$\{\s*(?:[\w.]+|oc\.env:[^${}]*)\s*\}")
_REFUSED = {"oc.coerce": "it imports modules"}
_PATCHED = threading.RLock()  # a resolver of the user's may load a configuration itself


class Interpolations:
    """Replaces each text that has an interpolation by a marker (placeholder), and each marker by the text's value.

    Settings are merged between these two operations (``taken_out`` and ``put_in``).
    """

    def __init__(self) -> None:
        self.texts: list[str] = []  # text n has the marker of number n
        self.places: dict[int, Path] = {}  # of the texts that are not evaluated yet, by number
        self.needed: int | None = None  # the number of a text that the text under evaluation needs first
        self.fault = ""  # of the text under evaluation, as a resolver found it
        self.num_calls = self.num_values = 0

    def taken_out(self, value: object) -> object:
        """Return a tree of settings, or a value in one, with a marker in place of each text that contains ``${``."""
        if isinstance(value, dict):
            return {name: self.taken_out(part) for name, part in value.items()}
        if isinstance(value, list):
            return [self.taken_out(part) for part in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        self.texts.append(value)
        return f"${{{_PENDING}:{len(self.texts) - 1}}}"

    def put_in(self, tree: dict[str, object], defaults: Callable[[], dict[str, object]]) -> dict[str, object]:
        """Return ``tree`` with each marker (placeholder) replaced by the value of the text that it stands for.

        tree: the merged settings, with the markers of ``taken_out``.
        defaults: a function that returns the tree of all defaults. Interpolations may refer to
            settings that ``tree`` lacks, and then get the default.

        Raises ConfigError with the key, the text and its fault.
        """
        # The texts, and the sections that they may refer to.
        self.places = {number: path for path, number in _markers(tree, ())}
        if not self.places:
            return tree
        texts = "\n".join(self.texts)
        if texts.count("${") > MOST_INTERPOLATIONS:
            raise ConfigError(f"there are more than {MOST_INTERPOLATIONS} interpolations; write values out")
        every, own = _over(escaped(defaults()), tree), {path[0] for path in self.places.values()}
        if len(_PLAIN.findall(texts)) == texts.count("${"):  # all plain: each section that they need is named in them
            every = {name: part for name, part in every.items() if name in own or name in texts}
        settings = OmegaConf.create(every)
        with self._guarded():
            for first in list(self.places):
                self._settle(first, settings, tree)
        return tree

    def _settle(self, first: int, settings, tree: dict[str, object]) -> None:
        """Evaluate a setting's text that contains an interpolation, after the texts that it refers to.

        In both ``settings`` and ``tree`` each text's value replaces the marker (placeholder) of the text.

        first: the text's number, its index in ``self.texts``.
        settings: OmegaConf's container in which texts are evaluated: ``tree``, and the defaults of
            settings that ``tree`` lacks.
        tree: the merged tree of settings.
        """
        stack = [first] * (first in self.places)
        while stack:
            number = stack[-1]
            value = self._evaluated(number, settings)
            if self.needed is None:
                _put(tree, self.places[number], value)
                _put(settings, self.places.pop(number), escaped(value))
                stack.pop()
            elif self.needed in stack:
                circle = [*stack[stack.index(self.needed) :], self.needed]
                chain = " → ".join(_key(self.places[each]) for each in circle)
                raise ConfigError(f"{self._named(self.needed)} refers to itself: {chain}; write one of them out")
            else:
                stack.append(self.needed)

    def _evaluated(self, number: int, settings) -> object:
        """Return the plain value of ``self.texts[number]``; None if another text must be evaluated first.

        ``self.needed`` is set to the other text's number, or to None if there is no other.

        settings: see ``_settle``.
        """
        path, self.needed, self.fault = self.places[number], None, ""
        parent = functools.reduce(lambda node, name: node[name], path[:-1], settings)
        try:
            parent[path[-1]] = self.texts[number]
            value = parent[path[-1]]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
        except (OmegaConfBaseException, RecursionError) as error:
            if self.needed is None:
                reason = f": {self.fault}" if self.fault else _reason(error)
                raise ConfigError(f"{self._named(number)}{reason}") from None
        if self.needed is not None:
            parent[path[-1]] = f"${{{_PENDING}:{number}}}"
            return None
        return self._bounded(number, value)

    def _bounded(self, number: int, value: object) -> object:
        if isinstance(value, str) and len(value) > MOST_CHARACTERS:
            raise ConfigError(f"{self._named(number)} becomes a text of more than {MOST_CHARACTERS} characters")
        self.num_values += _size(value)
        if self.num_values > MOST_VALUES:
            raise ConfigError(f"{self._named(number)}: interpolations bring more than {MOST_VALUES} values")
        return value

    def _named(self, number: int) -> str:
        return f"{_key(self.places[number])}={quoted(self.texts[number])}"

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Return a context that checks this thread's calls of OmegaConf's resolvers, and finds texts to evaluate first.

        A call raises LookupError if it is of oc.coerce, asks for a missing environment variable, or is
        one of more than MOST_CALLS. A marker stands for a text that is not evaluated yet. If
        OmegaConf meets a marker, ``self.needed`` becomes that text's number, and LookupError is raised
        too.
        """
        table = BaseContainer._resolvers  # OmegaConf's one table of resolvers, in 2.3 and 2.4
        with _PATCHED:
            before = dict(table)
            for name, resolver in before.items():
                table[name] = functools.partial(self._call, threading.get_ident(), name, resolver)
            table[_PENDING] = self._pending
            try:
                yield
            finally:
                del table[_PENDING]
                table.update(before)

    def _call(self, thread: int, name: str, resolver: Callable, root, parent, node, arguments, texts) -> object:
        if threading.get_ident() == thread:
            self.num_calls += 1
            if name == "oc.env" and len(arguments) == 1 and str(arguments[0]) not in os.environ:
                way_out = f"set it, or give a default, as in ${{oc.env:{arguments[0]},value}}"
                self.fault = f"the environment has no variable {quoted(arguments[0])}; {way_out}"
            elif name in _REFUSED:
                self.fault = f"{name} is not read, {_REFUSED[name]}; write the value out"
            elif self.num_calls > MOST_CALLS:
                self.fault = f"more than {MOST_CALLS} calls of resolvers; write values out"
            if self.fault:
                raise LookupError(self.fault)
        return resolver(root, parent, node, arguments, texts)

    def _pending(self, root, parent, node, arguments, texts) -> object:
        if arguments[0] not in self.places:
            raise UnsupportedInterpolationType(f"Unsupported interpolation type {_PENDING}")
        self.needed = arguments[0]
        raise LookupError("needed first")


def _reason(error: Exception) -> str:
    """Return the end of an error message: why OmegaConf could not evaluate a text, and the way out."""
    said = (str(error).splitlines() or [""])[0].strip()
    if unknown := re.search(r"Interpolation key '(.*?)' not found", said):
        return f": {quoted(unknown[1])} names no setting; write ${{section.key}} or ${{oc.env:VARIABLE}}"
    if isinstance(error, RecursionError) or re.search("[Rr]ecursi|to parent node", said):
        return " refers to itself or to its own section; replace it by a value"
    if resolver := re.search(r"Unsupported interpolation type (\S+)", said):
        known = ", ".join(name for name in BaseContainer._resolvers if name not in (_PENDING, *_REFUSED))
        return f": there is no resolver {quoted(resolver[1])}; those known are {known}"
    if isinstance(error, GrammarParseError):
        return rf" is not a valid interpolation ({shortened(said)}); write \${{ for a literal ${{"
    return f": {shortened(said, 200) or type(error).__name__}"


def _over(below: dict[str, object], above: dict[str, object]) -> dict[str, object]:
    """Return two trees of settings merged; a value of ``above`` replaces the value of ``below`` at its key.

    The two values may differ in type; OmegaConf's own merge refuses a list over a mapping.
    """
    both = dict(below)
    for name, value in above.items():
        inner = isinstance(value, dict) and isinstance(below.get(name), dict)
        both[name] = _over(below[name], value) if inner else value
    return both


def _markers(value: object, path: Path) -> Iterator[tuple[Path, int]]:
    """Yield (path, number) of each marker in a tree of settings; a marker stands for the text of its number.

    value, path: the tree or a part of it, and its path from the root.
    """
    if isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _markers(part, (*path, name))
    elif isinstance(value, str) and (found := _MARKER.fullmatch(value)):
        yield path, int(found[1])


def _put(tree, path: Path, value: object) -> None:
    functools.reduce(lambda part, name: part[name], path[:-1], tree)[path[-1]] = value


def _size(value: object) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_size, parts))


def _key(path: Path) -> str:
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in path).lstrip(".")

"""The scan of a pickle's opcodes before it is unpickled: it refuses a pickle that is no index of tensors.

An allow-list of names limits which functions a pickle calls, but not its memory. Nine bytes can ask
for a memo of 32 GB. A hundred bytes can build a tuple of 2^50 parts whose hash never ends. A few
million bytes can nest so deep that the interpreter crashes. Hence four rules:

1. Only the opcodes that an index of tensors needs are accepted.
2. The memo grows by one entry at a time.
3. Once a value was fetched from the memo, it cannot be changed. A class or function can never be
   changed. So the counts of rule 4 are exact: no value grows after it became a part of another.
4. The number of a value's parts is bounded, with a shared part counted at each reference. The depth
   of nesting is bounded too.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Iterable
from dataclasses import dataclass

MOST_DEPTH = 64
PARTS_PER_BYTE = 16  # of the pickle; an index of tensors has fewer than 1
ATOMS = {
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "GLOBAL",
}
IGNORED = {"PROTO", "FRAME", "STOP"}
EMPTY = {"EMPTY_LIST": True, "EMPTY_DICT": True, "EMPTY_SET": True, "EMPTY_TUPLE": False}  # value: whether it can grow
TAKEN = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "STACK_GLOBAL": 2, "NEWOBJ": 2, "REDUCE": 2}
ADDED = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}
ADDED_TO_MARK = {"APPENDS", "SETITEMS", "ADDITEMS"}


@dataclass(slots=True)
class _Value:
    """Holds the size of a value that the pickle would build, in place of the value.

    parts: the number of its parts at all levels.
    depth: how many levels deep its parts nest.
    grows: whether later opcodes may add parts to it.
    """

    parts: int = 1
    depth: int = 0
    grows: bool = False

    def take(self, others: Iterable[_Value], most_parts: int) -> None:
        for other in others:
            self.parts += other.parts
            self.depth = max(self.depth, 1 + other.depth)
        if self.parts > most_parts:
            raise pickle.UnpicklingError(f"it would build over {most_parts} parts, by references to the same ones")
        if self.depth > MOST_DEPTH:
            raise pickle.UnpicklingError(f"it nests more than {MOST_DEPTH} deep")


ATOM = _Value()


class _Machine:
    """Runs a pickle's opcodes on the sizes of values (_Value), so that no value is built.

    most_parts: the limit on the parts of one value, at all levels (rule 4 in the module's docstring).
    """

    def __init__(self, most_parts: int) -> None:
        self.most_parts = most_parts
        self.stack: list[_Value] = []
        self.marks: list[int] = []
        self.memo: list[_Value] = []

    def run(self, name: str, argument: object) -> None:
        stack = self.stack
        if name in IGNORED:
            return
        if name in ATOMS:
            stack.append(ATOM)
        elif name in EMPTY:
            stack.append(_Value(grows=EMPTY[name]))
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name == "TUPLE":
            self._made(self._popped(self.marks.pop()), grows=False)
        elif name in TAKEN:
            self._made(self._popped(len(stack) - TAKEN[name]), grows=name in ("NEWOBJ", "REDUCE"))
        elif name in ADDED_TO_MARK or name in ADDED:
            added = self._popped(self.marks.pop() if name in ADDED_TO_MARK else len(stack) - ADDED[name])
            if not stack[-1].grows:
                raise pickle.UnpicklingError(f"its {name} changes a value that is shared or global")
            stack[-1].take(added, self.most_parts)
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            self._remember(len(self.memo) if name == "MEMOIZE" else argument)
        elif name in ("BINGET", "LONG_BINGET"):
            self.memo[argument].grows = False
            stack.append(self.memo[argument])
        else:
            raise pickle.UnpicklingError(f"it uses the opcode {name}, which no index of tensors needs")

    def _popped(self, start: int) -> list[_Value]:
        if start < 0:
            raise pickle.UnpicklingError("it takes more values than there are")
        popped, self.stack[start:] = self.stack[start:], []
        return popped

    def _made(self, parts: list[_Value], *, grows: bool) -> None:
        value = _Value(grows=grows)
        value.take(parts, self.most_parts)
        self.stack.append(value)

    def _remember(self, place: int) -> None:
        if place > len(self.memo):
            raise pickle.UnpicklingError(f"it asks for a memo of {place + 1} places, and {len(self.memo)} are filled")
        self.memo[place : place + 1] = [self.stack[-1]]


def scan(content: bytes) -> None:
    """Raise UnpicklingError, ValueError or IndexError if the pickle ``content`` breaks one of the module's rules."""
    machine = _Machine(PARTS_PER_BYTE * len(content))
    for opcode, argument, _ in pickletools.genops(io.BytesIO(content)):
        machine.run(opcode.name, argument)

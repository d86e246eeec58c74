"""Reads a pickle's opcodes before it is unpickled: what they would build is counted, and refused where it is no index.

An allow-list of names bounds what a pickle calls, and not what it allocates: nine bytes can ask for
a memo of 32 GB, a hundred build a tuple of 2^50 parts whose hash never ends, a few million nest so
deep that the interpreter crashes.

1. Opcodes are those of an index of tensors alone.
2. The memo grows by one place at a time.
3. A value that was fetched from the memo, or a global one, is not changed any more: no class gets
   an attribute, and counts are exact, since no value grows within another.
4. Each value's parts, those that it refers to again counted again, and its depth are bounded.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Iterable
from dataclasses import dataclass

MOST_DEPTH = 64
PARTS_PER_BYTE = 16  # of the pickle; in an index of tensors it is below 1
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
EMPTY = {"EMPTY_LIST": True, "EMPTY_DICT": True, "EMPTY_SET": True, "EMPTY_TUPLE": False}  # whether it can grow
TAKEN = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "STACK_GLOBAL": 2, "NEWOBJ": 2, "REDUCE": 2}
ADDED = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}
ADDED_TO_MARK = {"APPENDS", "SETITEMS", "ADDITEMS"}


@dataclass(slots=True)
class _Value:
    """Counts a value: its parts with theirs, and how deep they nest. ``grows``: whether it may be changed."""

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
    """Runs opcodes on counts in place of values."""

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
    """Raise UnpicklingError, ValueError or IndexError where a pickle is not what an index of tensors is."""
    machine = _Machine(PARTS_PER_BYTE * len(content))
    for opcode, argument, _ in pickletools.genops(io.BytesIO(content)):
        machine.run(opcode.name, argument)

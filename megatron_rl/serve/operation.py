"""One operation of a client, and the line that it stands in; ``serve/operations.py`` runs them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_rl.serve.values import Fault

OPERATION_BYTES = 2048  # that an operation takes beside its body and its answer
WAITING, RUNNING, ENDED = "waiting", "running", "ended"


@dataclass(slots=True, kw_only=True, eq=False)
class Operation:
    """Holds one operation and, once it has ended, its answer.

    id: by which its client asks for the answer. owner: the client's key, digested.
    line, seq: its place.
    depends: whether later operations of its line make no sense if it fails.
    header: what to do, as JSON. body: the client's data, which travel to every rank. parsed: the
        same, on rank 0.
    held: bytes that it takes while it waits. weight: the samples that it asks for.
    content: the answer's bytes, and their type; error: its message and whose fault it is. told: to
        its client.
    """

    id: str
    owner: str
    line: str
    seq: int
    kind: str
    header: Mapping[str, object]
    body: bytes = b""
    parsed: object = None
    depends: bool = False
    held: int = OPERATION_BYTES
    weight: int = 1
    digest: str = ""
    state: str = WAITING
    content: tuple[bytes, str] | None = None
    error: tuple[str, Fault] | None = None
    told: bool = False
    arrived_at: float = 0.0
    asked_at: float = 0.0
    watchers: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=list)

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that it takes once it has ended, its answer included."""
        if self.state != ENDED:
            return 0
        return OPERATION_BYTES + (0 if self.content is None else len(self.content[0]))


def digest_of(*parts: bytes) -> str:
    """Return a digest by which two requests are the same."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


@dataclass(slots=True, kw_only=True, eq=False)
class Line:
    """Holds one line's waiting operations by number; ``next`` is the number that runs next where order matters.

    turn: grows with each time that a line is begun or served; the lowest one is next.
    failed: why nothing runs until the client was told. failed_at: the lowest number by whose answer
        it learns of that.
    """

    ordered: bool = True
    next: int = 0
    waiting: dict[int, Operation] = field(default_factory=dict)
    failed: tuple[str, Fault] | None = None
    failed_at: int = 0
    running: bool = False
    turn: int = 0

    def stop(self, why: tuple[str, Fault], failed_at: int) -> None:
        """Run nothing more of an ordered line until the client was told why."""
        if self.ordered:
            self.failed, self.failed_at = why, failed_at

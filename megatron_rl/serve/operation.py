"""The operations of clients, and the lines in which they wait. ``serve/operations.py`` orders them.

A line is a model or a sampler, whose operations are numbered.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_rl.serve.values import Fault

OPERATION_BYTES = 2048  # bytes of an operation beside its body and its answer
WAITING, RUNNING, ENDED = "waiting", "running", "ended"


@dataclass(slots=True, kw_only=True, eq=False)
class Operation:
    """Holds one operation and, once it has ended, its answer.

    id: the id by which its client asks for the answer.
    owner: a digest of the client's key.
    line, seq: its line, and its number there.
    depends: whether later operations of its line make no sense if it fails.
    header: what to do, as JSON-able values.
    body: the client's data, which are sent to every rank. parsed: their values, on rank 0.
    held: bytes that it takes while it waits.
    weight: the number of samples that it requests.
    content: the answer's bytes, and their type. error: the error's message, and whose fault it is.
    told: whether its client was given the answer or the error.
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
        """Return the bytes that an ended operation takes, its answer included; 0 before its end."""
        if self.state != ENDED:
            return 0
        return OPERATION_BYTES + (0 if self.content is None else len(self.content[0]))


def digest_of(*parts: bytes) -> str:
    """Return a digest of a request's parts. Two requests are the same if their digests are."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


@dataclass(slots=True, kw_only=True, eq=False)
class Line:
    """Holds the waiting operations of one line.

    ordered: whether its operations run in the order of their numbers.
    next: the number that runs next in an ordered line.
    waiting: number → operation.
    failed: the failure that the client must be told before anything runs.
    failed_at: the lowest number whose answer tells the client of that failure.
    turn: a number that is set when the line is opened or served. The line with the lowest is next.
    """

    ordered: bool = True
    next: int = 0
    waiting: dict[int, Operation] = field(default_factory=dict)
    failed: tuple[str, Fault] | None = None
    failed_at: int = 0
    running: bool = False
    turn: int = 0

    def stop(self, why: tuple[str, Fault], failed_at: int) -> None:
        """Stop an ordered line until its client was told of the failure ``why``."""
        if self.ordered:
            self.failed, self.failed_at = why, failed_at

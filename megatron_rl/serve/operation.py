"""The operations of clients, and the queues in which they wait. ``serve/operations.py`` orders them.

An operation is a client's request that runs on all ranks. Each model and each sampler has a queue,
in which operations are numbered.
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
    line: the name of its model or sampler, which names its queue.
    seq: its number in that queue.
    kind: the kind of request, such as "optim_step".
    depends: whether later operations of its queue make no sense if it fails.
    header: what to do, as JSON-able values.
    body: the client's data, which are sent to every rank.
    parsed: the values of ``body``, on rank 0; None if there are none.
    held: the number of bytes that it takes while it waits.
    weight: the number of samples that it requests.
    digest: a digest of the request, to recognise a repeated one.
    content: the answer's bytes and content type; None without an answer.
    error: the error's message and who is at fault; None without an error.
    told: whether its client was given the answer or the error.
    arrived_at, asked_at: when it arrived, and when its client last asked for the answer, in
        monotonic seconds.
    watchers: the event loop and the event of each request that waits for its end.
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
    """Return a digest of a request's parts. Two requests count as the same if their digests are equal."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


@dataclass(slots=True, kw_only=True, eq=False)
class Line:
    """Holds the queue of one model or one sampler: its waiting operations.

    ordered: whether its operations run in the order of their numbers.
    next: the number that runs next in an ordered queue.
    waiting: number → operation.
    failed: a failure (message, fault) of which the client was not told yet; None if there is none.
        Until the client is told, nothing in the queue runs.
    failed_at: the client counts as told once it gets the error of an operation with this number or a
        higher one.
    running: whether one of its operations runs now.
    turn: a number that grows each time the queue is opened or served. The queue with the lowest
        number is served next.
    """

    ordered: bool = True
    next: int = 0
    waiting: dict[int, Operation] = field(default_factory=dict)
    failed: tuple[str, Fault] | None = None
    failed_at: int = 0
    running: bool = False
    turn: int = 0

    def stop(self, why: tuple[str, Fault], failed_at: int) -> None:
        """Stop an ordered queue until its client was told of a failure. An unordered queue goes on.

        why: the failure (message, fault).
        failed_at: the client counts as told once it gets the error of an operation with this number or
            a higher one.
        """
        if self.ordered:
            self.failed, self.failed_at = why, failed_at

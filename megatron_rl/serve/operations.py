"""The queue of operations on rank 0: each model's in the order of their numbers, and no operation twice. Thread-safe.

Invariants (tests/unit/serve/test_operations.py checks them under Hypothesis):

1. A line's operations run in the order of their numbers, whatever the order in which they arrive;
   none is left out.
2. An operation that arrives again is the same operation: it runs once, and both askers get its one
   answer.
3. Another request under a number that was used is refused.
4. Every accepted operation ends: by its answer, by an error, or, at ``queue_s`` or ``gap_s``, by an
   error that says so.
5. After an operation of a line has failed that training depends on, those that are queued behind it
   fail with it, until its client has been told: nothing is trained on half a step. What a client
   sends after that runs.
6. Lines take turns: between two operations of one line every other line with a ready operation has
   had one.

A line is a model, whose operations are numbered from 0, or a sampler, whose requests run in any
order, many at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from megatron_rl.serve.operation import ENDED, RUNNING, Line, Operation
from megatron_rl.serve.values import Fault, RequestError


class Operations:
    """Holds all operations. ``ended`` is called, without the lock, for each that has ended."""

    def __init__(
        self,
        *,
        gap_s: float,
        queue_s: float,
        max_bytes: int,
        max_batch: int,
        ended: Callable[[Operation], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gap_s, self.queue_s, self.max_bytes, self.max_batch = gap_s, queue_s, max_bytes, max_batch
        self._ended, self._clock = ended, clock
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._lines: dict[str, Line] = {}
        self._busy: dict[str, Line] = {}  # those in which something waits
        self._turns = itertools.count()
        self._all: dict[str, Operation] = {}
        self._bytes = 0  # of operations that have not ended
        self._kept = 0  # of the answers of those that have

    # ---- the clients' side ------------------------------------------------------------------------------------------

    def open_line(
        self, line: str, *, first: int = 0, ordered: bool = True, failed: tuple[str, Fault] | None = None
    ) -> bool:
        """Begin a line, which stays; return False, and change nothing, where it was begun before.

        ``first`` is its next number, ``failed`` the failure to tell its client first.
        """
        with self._lock:
            if line in self._lines:
                return False
            turn = next(self._turns)
            self._lines[line] = Line(next=first, ordered=ordered, failed=failed, failed_at=first, turn=turn)
            return True

    def fail_line(self, line: str, error: tuple[str, Fault]) -> None:
        """Fail what waits in a line, and what comes to it until its client was told."""
        with self._lock:
            failed_at = self._lines[line].next
            doomed = self._doom(line, error)
            self._lines[line].stop(error, failed_at)
        self._announce(doomed)

    def find(self, id: str) -> Operation | None:
        with self._lock:
            return self._all.get(id)

    def add(self, operation: Operation, accept: Callable[[Operation], None] = lambda _: None) -> Operation:
        """Queue an operation, and return it, or the one that it repeats.

        accept: called once for a new one, before it can run. In a line whose client was not told of
            a failure yet it
        fails at once. Raises RequestError for a number that another request has, and where too much
        waits already (HTTP 429).
        """
        with self._lock:
            if (known := self._all.get(operation.id)) is not None:
                if known.digest != operation.digest:
                    raise RequestError(
                        f"number {operation.seq} of {operation.line} was used by another {known.kind} request; number "
                        "each request anew",
                        status=422,
                    )
                return known
            line = self._lines[operation.line]
            if line.ordered and operation.seq < line.next and line.failed is None:
                raise RequestError(
                    f"number {operation.seq} of {operation.line} is over: {line.next} is next, and its answer is kept "
                    "no longer",
                    status=410,
                )
            if self._bytes + operation.held > self.max_bytes and self._bytes:
                raise RequestError(
                    f"requests of {self._bytes:,} bytes are waiting, and serve.max_queue_mb allows {self.max_bytes:,}; "
                    "try again",
                    status=429,
                    fault=Fault.SERVER,
                )
            operation.arrived_at = operation.asked_at = self._clock()
            accept(operation)
            self._all[operation.id] = operation
            self._bytes += operation.held
            line.waiting[operation.seq] = operation
            self._busy[operation.line] = line
            doomed = [] if line.failed is None else self._doom(operation.line, line.failed)
            self._arrived.notify_all()
        self._announce(doomed)
        return operation

    async def wait(self, operation: Operation, seconds: float) -> bool:
        """Wait until an operation has ended, ``seconds`` at most; return whether it has."""
        event = asyncio.Event()
        watcher = (asyncio.get_running_loop(), event)
        with self._lock:
            operation.asked_at = self._clock()
            if operation.state == ENDED:
                return True
            operation.watchers.append(watcher)
        try:
            await asyncio.wait_for(event.wait(), seconds)
            return True
        except TimeoutError:
            return False
        finally:
            with self._lock:
                if watcher in operation.watchers:
                    operation.watchers.remove(watcher)

    def tell(self, operation: Operation) -> None:
        """Note that a client was given an operation's answer or error; a failed line goes on then."""
        with self._lock:
            operation.asked_at, operation.told = self._clock(), True
            line = self._lines[operation.line]
            if operation.error is not None and operation.seq >= line.failed_at:
                line.failed = None

    def tell_line(self, line: str) -> None:
        """Note that a line's client was told of a failure that no operation held here has; the line goes on then."""
        with self._lock:
            if line in self._lines:
                self._lines[line].failed = None

    def failure_of(self, line: str) -> tuple[str, Fault] | None:
        """Return the failure that a line's client has not been told yet."""
        with self._lock:
            return self._lines[line].failed if line in self._lines else None

    def forget(self, older_s: float) -> list[str]:
        """Forget ended operations that nobody has asked for in ``older_s``; return their ids."""
        with self._lock:
            old = self._clock() - older_s
            return self._drop([x for x in self._all.values() if x.state == ENDED and x.asked_at < old])

    def _drop(self, operations: Sequence[Operation]) -> list[str]:
        """Forget ended operations under the lock; return their ids."""
        for operation in operations:
            del self._all[operation.id]
            self._kept -= operation.kept_bytes
        return [operation.id for operation in operations]

    def _make_room(self) -> None:
        """Forget answers, under the lock, while they take more than ``max_bytes``: half of those of who has the most.

        Those that were given to their client go first, the newest one stays.
        """
        while self._kept > self.max_bytes:
            sizes: Counter[str] = Counter()
            for operation in self._all.values():
                sizes[operation.owner] += operation.kept_bytes
            owner = sizes.most_common(1)[0][0]
            own = [x for x in self._all.values() if x.owner == owner and x.state == ENDED]
            own = sorted(own, key=lambda x: (not x.told, x.asked_at))[:-1]
            if not own:
                return
            self._drop(own[: len(own) // 2 + 1])

    # ---- the worker's side ------------------------------------------------------------------------------------------

    def take(self, timeout_s: float) -> list[Operation]:
        """Return what runs next: one operation, or several of a sampler that run together; [] where nothing is ready.

        It waits for ``timeout_s`` at most. What was taken must be ended by ``finish`` or ``fail``.
        """
        ends_at = time.monotonic() + timeout_s
        while True:
            self._end_overdue()
            with self._lock:
                if taken := self._ready():
                    for operation in taken:
                        operation.state = RUNNING
                    return taken
                left = ends_at - time.monotonic()
                if left <= 0:
                    return []
                self._arrived.wait(min(left, 1.0))

    def _ready(self) -> list[Operation]:
        for name, line in self._by_turn():
            if line.failed is not None or line.running:
                continue
            if not line.ordered:
                return self._batch(next(iter(line.waiting.values())))
            if line.next in line.waiting:
                line.running = True
                return [self._served(name, line, line.next)]
        return []

    def _by_turn(self) -> list[tuple[str, Line]]:
        return sorted(self._busy.items(), key=lambda item: item[1].turn)

    def _served(self, name: str, line: Line, seq: int) -> Operation:
        """Take an operation out of its line, which has had its turn then."""
        line.turn = next(self._turns)
        operation = line.waiting.pop(seq)
        if not line.waiting:
            del self._busy[name]
        return operation

    def _batch(self, first: Operation) -> list[Operation]:
        """Return the waiting requests that may run with ``first``: of the same weights, in any line, up to a size."""
        taken, weight = [], 0
        for name, line in self._by_turn():
            for operation in [] if line.ordered else list(line.waiting.values()):
                same = operation.header["weights"] == first.header["weights"]
                if not same or (taken and weight + operation.weight > self.max_batch):
                    continue
                taken.append(self._served(name, line, operation.seq))
                weight += operation.weight
        return taken

    def finish(self, operation: Operation, content: bytes, content_type: str) -> None:
        """End an operation by its answer."""
        with self._lock:
            self._end(operation, content=(content, content_type))
        self._announce([operation])

    def fail(self, operation: Operation, message: str, fault: Fault) -> None:
        """End an operation by an error; those behind it that depend on it fail too, until the client was told.

        All of it is one change under the lock, so that what a client sends once it was told never
        fails with it.
        """
        with self._lock:
            self._end(operation, error=(message, fault))
            doomed = []
            if operation.depends:
                cause = (f"it was queued behind number {operation.seq}, which failed: {message}", fault)
                doomed = self._doom(operation.line, cause)
                self._lines[operation.line].stop(cause, operation.seq)
        self._announce([operation, *doomed])

    def _doom(self, name: str, error: tuple[str, Fault]) -> list[Operation]:
        """End, under the lock, what waits in a line by an error; return it, to be announced."""
        line = self._lines[name]
        doomed = sorted(line.waiting.values(), key=lambda x: x.seq)
        line.waiting = {}
        self._busy.pop(name, None)
        for operation in doomed:
            self._end(operation, error=error)
            line.next = max(line.next, operation.seq + 1)
        return doomed

    def _end(
        self,
        operation: Operation,
        *,
        content: tuple[bytes, str] | None = None,
        error: tuple[str, Fault] | None = None,
    ) -> None:
        """Note under the lock that an operation has ended."""
        was_running = operation.state == RUNNING
        operation.content, operation.error, operation.state = content, error, ENDED
        operation.asked_at = self._clock()
        self._bytes -= operation.held
        operation.body, operation.parsed = b"", None
        self._kept += operation.kept_bytes
        self._make_room()
        line = self._lines[operation.line]
        if line.ordered and was_running:
            line.running, line.next = False, max(line.next, operation.seq + 1)
            self._arrived.notify_all()

    def _announce(self, operations: Sequence[Operation]) -> None:
        """Tell, without the lock, all who wait for operations that these have ended."""
        for operation in operations:
            self._ended(operation)
            with self._lock:
                watchers, operation.watchers = operation.watchers, []
            for loop, event in watchers:
                with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
                    loop.call_soon_threadsafe(event.set)

    def _end_overdue(self) -> None:
        """End what has waited too long: behind a gap in the numbers, or for its turn."""
        now, doomed = self._clock(), []
        with self._lock:
            for name, line in list(self._busy.items()):
                error = self._overdue_words(line, now)
                if error is not None:
                    late = self._doom(name, error)
                    line.stop(error, late[0].seq)
                    doomed += late
        self._announce(doomed)

    def _overdue_words(self, line: Line, now: float) -> tuple[str, Fault] | None:
        if not line.waiting:
            return None
        waited = now - min(x.arrived_at for x in line.waiting.values())
        if line.ordered and not line.running and line.next not in line.waiting and waited > self.gap_s:
            return self._gap_words(line), Fault.USER
        if waited > self.queue_s:
            text = f"it waited for {waited:.0f} s, longer than serve.queue_s={self.queue_s:g}"
            return text, Fault.SERVER
        return None

    def _gap_words(self, line: Line) -> str:
        numbers = ", ".join(map(str, sorted(line.waiting)[:5]))
        return (
            f"number {line.next} did not arrive in serve.gap_s={self.gap_s:g} s, and the requests behind it (numbers "
            f"{numbers}) cannot run without it"
        )

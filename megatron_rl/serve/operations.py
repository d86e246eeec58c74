"""The queues of operations on rank 0: a model's operations run in the order of their numbers, each once. Thread-safe.

Each model and each sampler has a queue (``Line``). A model's operations are numbered from 0. A
sampler's requests run in any order, many at a time.

Invariants (tests/unit/serve/test_operations.py checks them under Hypothesis):

1. The operations of a model run in the order of their numbers, for any order of their arrival.
   None is left out.
2. An operation that arrives again is the same operation. It runs once, and every request for its
   answer gets the same answer.
3. Another request under a used number is refused.
4. Every accepted operation ends: by its answer, by an error, or, after ``queue_s`` or ``gap_s``, by
   an error that names the limit.
5. If training depends on an operation that failed, the operations behind it in its queue fail too,
   until the client was told of the failure. So nothing is trained on half a step. Requests that the
   client sends later run.
6. Queues take turns: between two operations of one queue, every other queue with a ready operation
   has had a turn.
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
    """Holds all operations, in one queue per model or sampler, and decides which runs next.

    gap_s: seconds that a model's operations wait for an operation with a lower number to arrive.
    queue_s: seconds that an operation may wait in its queue.
    max_bytes: two limits in one: the maximum of bytes of all operations that have not ended, and that
        of all ended ones, which are kept with their answers.
    max_batch: the maximum of samples that run together.
    ended: a function that is called with each operation that has ended; it may call this object.
    clock: a function that returns monotonic seconds.
    """

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
        self._busy: dict[str, Line] = {}  # the queues with waiting operations
        self._turns = itertools.count()
        self._all: dict[str, Operation] = {}
        self._bytes = 0  # bytes of operations that have not ended
        self._kept = 0  # bytes of operations that have ended, with their answers

    # ---- the clients' side ------------------------------------------------------------------------------------------

    def open_line(
        self, line: str, *, first: int = 0, ordered: bool = True, failed: tuple[str, Fault] | None = None
    ) -> bool:
        """Open a queue for a model or a sampler. If it is open already, return False and change nothing.

        Queues are never removed.

        line: the name of the model or sampler.
        first: the number of the queue's next operation.
        ordered: whether operations run in the order of their numbers, as a model's do.
        failed: a failure (message, fault) that stops the queue until its client was told; None if
            there is none.
        """
        with self._lock:
            if line in self._lines:
                return False
            turn = next(self._turns)
            self._lines[line] = Line(next=first, ordered=ordered, failed=failed, failed_at=first, turn=turn)
            return True

    def fail_line(self, line: str, error: tuple[str, Fault]) -> None:
        """End the operations that wait in the queue named ``line`` with an error.

        Operations that arrive later end with it too, until the queue's client was told of it.

        error: (message, fault).
        """
        with self._lock:
            failed_at = self._lines[line].next
            doomed = self._doom(line, error)
            self._lines[line].stop(error, failed_at)
        self._announce(doomed)

    def find(self, id: str) -> Operation | None:
        with self._lock:
            return self._all.get(id)

    def add(self, operation: Operation, accept: Callable[[Operation], None] = lambda _: None) -> Operation:
        """Queue an operation and return it. If it repeats an earlier operation, return the earlier one.

        accept: a function that is called once with a new operation, before it can run.

        If its queue is stopped by an earlier failure of which the client was not told yet, the
        operation fails at once. Raises RequestError if another request has used the operation's number,
        or if the queue is past that number. Raises it with HTTP status 429 if too many bytes wait.
        """
        with self._lock:
            # Return the operation that this one repeats, or refuse it.
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
            # Queue it. If its queue has failed, it fails at once.
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
        """Wait until an operation has ended, at most ``seconds``; return whether it has ended."""
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
        """Note that a client was given an operation's answer or error.

        If the queue was stopped by a failure that this error reports, it goes on: operations that
        arrive from now on can run.
        """
        with self._lock:
            operation.asked_at, operation.told = self._clock(), True
            line = self._lines[operation.line]
            if operation.error is not None and operation.seq >= line.failed_at:
                line.failed = None

    def tell_line(self, line: str) -> None:
        """Note that the client of the queue ``line`` was told of its failure. New operations can run.

        Call it if the answer about an operation that is not in memory told the client. For other
        operations ``tell`` notes it.
        """
        with self._lock:
            if line in self._lines:
                self._lines[line].failed = None

    def failure_of(self, line: str) -> tuple[str, Fault] | None:
        """Return the failure (message, fault) that stops the queue named ``line`` until its client is told, or None."""
        with self._lock:
            return self._lines[line].failed if line in self._lines else None

    def forget(self, older_s: float) -> list[str]:
        """Forget ended operations for which no client has asked in the last ``older_s`` seconds; return their ids."""
        with self._lock:
            old = self._clock() - older_s
            return self._drop([x for x in self._all.values() if x.state == ENDED and x.asked_at < old])

    def _drop(self, operations: Sequence[Operation]) -> list[str]:
        """Forget ended operations; return their ids. The caller holds the lock."""
        for operation in operations:
            del self._all[operation.id]
            self._kept -= operation.kept_bytes
        return [operation.id for operation in operations]

    def _make_room(self) -> None:
        """Forget answers until the kept ones take at most ``max_bytes`` together. The caller holds the lock.

        Each round forgets half of the answers of the owner with the most bytes. Answers that were
        given to their client go first. The owner's newest answer stays.
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
        """Return the operations that run next: one, or several sampling requests that run together.

        It waits at most ``timeout_s``, then returns [] if nothing is ready. Every returned operation
        must be ended by ``finish`` or ``fail``.
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
        """Take operation ``seq`` out of its queue and return it. The queue's next turn comes after all others'.

        name: the queue's name.
        """
        line.turn = next(self._turns)
        operation = line.waiting.pop(seq)
        if not line.waiting:
            del self._busy[name]
        return operation

    def _batch(self, first: Operation) -> list[Operation]:
        """Return waiting sampling requests that run together with ``first``: for the same weights, from any sampler.

        Together they request at most ``max_batch`` samples, unless a single one requests more.
        """
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
        """End an operation by its answer: ``content``, the body of the HTTP answer, and ``content_type``."""
        with self._lock:
            self._end(operation, content=(content, content_type))
        self._announce([operation])

    def fail(self, operation: Operation, message: str, fault: Fault) -> None:
        """End an operation with an error. If training depends on it, all operations waiting in its queue fail too.

        They fail in one step under the lock. So a request that the client sends after it knows of the
        error is not among them.
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
        """End the operations that wait in the queue ``name`` with an error; return them. The caller holds the lock.

        The caller must pass them to ``_announce`` once it has released the lock.
        """
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
        """Record that an operation has ended, by an answer or an error. The caller holds the lock."""
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
        """Call ``ended`` with each operation, and wake all that wait for its end. The caller does not hold the lock."""
        for operation in operations:
            self._ended(operation)
            with self._lock:
                watchers, operation.watchers = operation.watchers, []
            for loop, event in watchers:
                with contextlib.suppress(RuntimeError):  # the event loop has ended, and nothing waits
                    loop.call_soon_threadsafe(event.set)

    def _end_overdue(self) -> None:
        """If an operation has waited too long, end all waiting operations of its queue with an error.

        The limits: ``gap_s`` for an operation with a lower number to arrive, ``queue_s`` for its turn.
        """
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

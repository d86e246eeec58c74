"""Threads for environments' steps, each step with a deadline: a step that hangs costs only its own sample.

1. Calls begin in the order in which they were handed in, each as soon as one of ``num_threads``
   threads is free.
2. A call that takes longer than ``deadline_s`` seconds is given up at once, by a thread that watches
   the deadlines. A new thread replaces the call's own, which may hang forever.
3. So a call that waits behind n calls begins within ⌈n / num_threads⌉ deadlines, and has ended one
   deadline later.
4. If PATIENCE · ``num_threads`` calls in a row have missed their deadline, the waiting calls are
   given up untried. So an environment that is down costs few deadlines, however many samples wait.
5. With ``stops`` (a failure ends the run), every ``wait`` returns at the first call that fails, and
   the waiting calls are not tried.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

from megatron_rl.users_code import exit_is_an_error

log = logging.getLogger(__name__)


PATIENCE = 2  # late calls in a row, per thread, after which waiting calls are not tried


class Overdue(TimeoutError):
    """Signals that a call took longer than its deadline. The message has the stack of the call's thread."""


class Ticket:
    """Holds one call and, after its end, the value that it returned or its error.

    act: the callable that is called without arguments.
    subject: an object by which the caller recognises the call.
    """

    __slots__ = ("act", "ends_at", "ended", "error", "forgotten", "subject", "thread", "value")

    def __init__(self, act: Callable[[], object], subject: object) -> None:
        self.act, self.subject, self.value = act, subject, None
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.ends_at = 0.0  # the deadline on time.monotonic, once the call has begun
        self.ended = self.forgotten = False

    def result(self) -> object:
        """Return the value of a call that has ended, or raise its error.

        Raises Overdue for a call that was late. Raises RuntimeError for a call that ``sys.exit`` or
        ``os._exit`` ended, or that was given up before it began.
        """
        if self.error is None:
            return self.value
        if isinstance(self.error, Exception):
            raise self.error
        raise RuntimeError(  # the error itself would end this thread too, and a SystemExit the run, as a success
            f"a step of an environment ended with {type(self.error).__name__}: {self.error}"
        ) from self.error


class StepPool:
    """Runs calls on up to ``num_threads`` threads, each call with a deadline.

    deadline_s: the seconds after which a call is given up.
    stops: whether every ``wait`` returns as soon as one call has failed.
    key: the name of the setting that gives ``deadline_s``, for messages.

    Example: ``pool.wait(pool.submit(lambda: 6 * 7)).result()`` is 42.
    """

    def __init__(
        self, num_threads: int, deadline_s: float, *, stops: bool = False, key: str = "environment.deadline_s"
    ) -> None:
        self._key = key
        self.num_threads, self.deadline_s, self.stops = num_threads, deadline_s, stops
        self._change = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._running: set[Ticket] = set()
        self._num_threads = 0  # threads alive, without those given up
        self._overdue = 0  # late calls in a row
        self._failed: Ticket | None = None  # with ``stops``, the first call that failed
        self._watched = self._closed = False

    def submit(self, act: Callable[[], object], subject: object = None) -> Ticket:
        """Hand in a call and return its ticket. ``subject``: an object that is kept in the ticket."""
        ticket = Ticket(act, subject)
        with self._change:
            if self._closed:
                raise RuntimeError("the environments' threads are closed")
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, daemon=True, name="environments-deadlines").start()
            self._waiting.append(ticket)
            self._staff()
            self._change.notify_all()
        return ticket

    def _staff(self) -> None:
        """Start as many threads as the waiting calls need, up to ``num_threads``. The caller holds lock ``_change``."""
        while self._num_threads < self.num_threads and self._num_threads - len(self._running) < len(self._waiting):
            self._num_threads += 1
            threading.Thread(target=self._work, daemon=True, name="environments").start()

    def _work(self) -> None:
        while True:
            with self._change:
                while not self._waiting and not self._closed:
                    self._change.wait()  # idle: ended by close, or with the process
                if self._closed:
                    return
                ticket = self._waiting.popleft()
                ticket.thread, ticket.ends_at = threading.current_thread(), time.monotonic() + self.deadline_s
                self._running.add(ticket)
                self._change.notify_all()
            value, error = None, None
            try:
                with exit_is_an_error():
                    value = ticket.act()
            except BaseException as raised:  # noqa: BLE001 (raised by result, in the thread that asks)
                error = raised
            with self._change:
                if ticket.ended:  # it was given up, and this thread replaced
                    return
                ticket.value, ticket.error, ticket.ended, self._overdue = value, error, True, 0
                self._running.discard(ticket)
                self._note_failure(ticket)
                self._change.notify_all()

    def _note_failure(self, ticket: Ticket) -> None:
        if self.stops and self._failed is None and ticket.error is not None and not ticket.forgotten:
            self._failed = ticket
            self._give_up_waiting(RuntimeError("a step of an environment was not tried, since another had failed"))

    @property
    def failed(self) -> Ticket | None:
        """Return the first call that failed; None if none failed. With ``stops=False`` it is always None."""
        return self._failed

    def wait(self, ticket: Ticket) -> Ticket:
        """Wait until the call has ended, and return its ticket.

        If ``stops`` is True, the wait also ends if another call failed. Then that call's ticket is
        returned.
        """
        with self._change:
            self._change.wait_for(lambda: ticket.ended or self._failed is not None)
            return self._failed or ticket

    def _watch(self) -> None:
        """Give up each call at its deadline, until the pool is closed and no call runs."""
        with self._change:
            while self._running or not self._closed:
                self._give_up_overdue()
                nearest = min((x.ends_at for x in self._running), default=None)
                self._change.wait(None if nearest is None else max(0.0, nearest - time.monotonic()))

    def _give_up_overdue(self) -> None:
        now = time.monotonic()
        for ticket in [x for x in self._running if x.ends_at <= now]:
            frame = sys._current_frames().get(ticket.thread.ident)
            stack = "" if frame is None else "".join(traceback.format_stack(frame)[-6:])
            ticket.error, ticket.ended = (
                Overdue(f"it took longer than {self._key}={self.deadline_s:g} s, at\n{stack}"),
                True,
            )
            self._running.discard(ticket)
            self._num_threads -= 1
            self._overdue += 1
            self._note_failure(ticket)
            self._change.notify_all()
            log.warning("a step of an environment hangs; its thread is abandoned")
        if self._overdue >= PATIENCE * self.num_threads:
            self._give_up_waiting(
                Overdue(f"{self._overdue} steps in a row took longer than {self.deadline_s:g} s; it was not tried")
            )
        self._staff()

    def _give_up_waiting(self, error: Exception) -> None:
        for ticket in self._waiting:
            ticket.error, ticket.ended = error, True
        self._waiting.clear()
        self._overdue = 0
        self._change.notify_all()

    def forget(self) -> None:
        """Give up every call that has not begun, and ignore failures of calls that have begun."""
        with self._change:
            self._failed = None
            for ticket in self._running:
                ticket.forgotten = True
            self._give_up_waiting(RuntimeError("a step of an environment was given up before it began"))

    def close(self) -> None:
        """End idle threads. A second call does nothing."""
        self.forget()
        with self._change:
            self._closed = True
            self._change.notify_all()

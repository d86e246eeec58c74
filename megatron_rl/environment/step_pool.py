"""Threads for environments' steps, each with a deadline from its start: a step that hangs costs only its own sample.

1. A call begins in the order in which it was handed in, as soon as one of ``num_threads`` threads is free.
2. One that takes longer than ``deadline_s`` is given up: its thread ends whenever it does, and another replaces it, so
   that no other sample lacks a thread.
3. ``result`` returns or raises in a time that is bounded by the calls before it: every waiting thread gives up the
   calls that are overdue.
4. After PATIENCE · ``num_threads`` overdue calls in a row, the waiting calls are not tried: an environment that is down
   costs a few deadlines and not one for every ``num_threads`` samples.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

from megatron_rl.config.no_exit import exit_is_an_error

log = logging.getLogger(__name__)


PATIENCE = 2


class Overdue(TimeoutError):
    """Reports a call that took longer than its deadline; the message carries its stack."""


class Ticket:
    """Holds one call, and its value or its error once it has ended."""

    __slots__ = ("act", "ends_at", "ended", "error", "thread", "value")

    def __init__(self, act: Callable[[], object]) -> None:
        self.act, self.value = act, None
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.ends_at = 0.0  # on time.monotonic, once it began
        self.ended = False


class StepPool:
    """Runs calls on up to ``num_threads`` threads: ``pool.result(pool.submit(lambda: 6 * 7))`` is 42."""

    def __init__(self, num_threads: int, deadline_s: float) -> None:
        self.num_threads, self.deadline_s = num_threads, deadline_s
        self._change = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._running: set[Ticket] = set()
        self._num_threads = 0  # alive, and not given up
        self._overdue = 0  # in a row
        self._closed = False

    def submit(self, act: Callable[[], object]) -> Ticket:
        ticket = Ticket(act)
        with self._change:
            if self._closed:
                raise RuntimeError("the environments' threads are closed")
            self._waiting.append(ticket)
            self._staff()
            self._change.notify_all()
        return ticket

    def _staff(self) -> None:
        """Start as many threads as the calls need. Called under ``_change``."""
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
                if ticket.ended:  # given up, and this thread replaced
                    return
                ticket.value, ticket.error, ticket.ended, self._overdue = value, error, True, 0
                self._running.discard(ticket)
                self._change.notify_all()

    def result(self, ticket: Ticket) -> object:
        """Return the call's value, or raise its error or Overdue.

        Raises RuntimeError for a call that ``sys.exit`` or ``os._exit`` ended, or that was forgotten before it began.
        """
        with self._change:
            while not ticket.ended:
                self._give_up_overdue()
                if ticket.ended:
                    break
                nearest = min((x.ends_at for x in self._running), default=time.monotonic() + self.deadline_s)
                self._change.wait(max(0.0, nearest - time.monotonic()))
        if ticket.error is not None:
            if isinstance(ticket.error, Exception):
                raise ticket.error
            raise RuntimeError(  # its own kind would end this thread too, and a SystemExit the run, as a success
                f"a step of an environment ended with {type(ticket.error).__name__}: {ticket.error}"
            ) from ticket.error
        return ticket.value

    def _give_up_overdue(self) -> None:
        now = time.monotonic()
        for ticket in [x for x in self._running if x.ends_at <= now]:
            frame = sys._current_frames().get(ticket.thread.ident)
            stack = "" if frame is None else "".join(traceback.format_stack(frame)[-6:])
            ticket.error, ticket.ended = (
                Overdue(f"it took longer than environment.deadline_s={self.deadline_s:g} s, at\n{stack}"),
                True,
            )
            self._running.discard(ticket)
            self._num_threads -= 1
            self._overdue += 1
            log.warning("a step of an environment hangs; its thread is given up")
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

    def forget_waiting(self) -> None:
        """Give up every call that has not begun."""
        with self._change:
            self._give_up_waiting(RuntimeError("a step of an environment was given up before it began"))

    def close(self) -> None:
        """End idle threads. May be called again."""
        self.forget_waiting()
        with self._change:
            self._closed = True
            self._change.notify_all()

"""Limits on the connections of a run's HTTP servers: their number, and the time until a request's headers arrive.

The maximum number follows from the process's limit of file descriptors. At a connection beyond that
number, the connection that was idle longest is closed. The headers of a connection's first request
must arrive within HEADERS_S seconds after the connection's start. The headers of a later request
must arrive within HEADERS_S seconds after their first byte. Uvicorn closes connections that are
idle between two requests. The kernel holds new connections while the server is busy.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import time
from asyncio.trsock import TransportSocket
from collections.abc import Callable

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 20.0
MOST = 4096  # connections, even if the limit of descriptors is higher
BACKLOG = 32  # connections that asyncio accepts at once, before any of them is counted
WAITING = 4096  # connections that the kernel holds until they are accepted; net.core.somaxconn may lower the number
SPARE = 64  # descriptors for files: checkpoints, the store, a module's import
LEAST = 8  # connections, even if the limit of descriptors is lower
MINUTE_S = 60.0
MOST_KINDS = 1000  # kinds of lines that a log filter remembers


def most_connections() -> int:
    """Return how many connections this process may hold, by its limit of file descriptors (``ulimit -n``)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST
    return max(LEAST, min(MOST, soft - len(os.listdir("/proc/self/fd")) - BACKLOG - SPARE))


def hold_waiting(listener: TransportSocket) -> None:
    """Let the kernel hold up to WAITING connections that a listening server has not accepted yet.

    asyncio has one number for these and for the connections that it accepts at once (Python 3.11
    ``base_events.py``, create_server). A client's connection beyond the number is not answered. The
    client tries again after 1, 2 and 4 s, and Linux may reset the connection then.

    listener: the server's socket, which listens already.
    """
    with socket.socket(fileno=os.dup(listener.fileno())) as own:
        own.listen(WAITING)


def protocol_of(most: int) -> type[H11Protocol]:
    """Return a subclass of uvicorn's h11 protocol with this module's limits. ``most``: the maximum of connections."""

    class Connection(H11Protocol):
        """Serves one connection. If its server had ``most`` already, closes the connection that was idle longest.

        ``most`` is the argument of ``protocol_of``. If no other connection is idle, the new one is
        closed again.

        waiting: the timer that closes the connection if a request's headers do not arrive in time.
            None if no timer runs.
        """

        waiting: asyncio.TimerHandle | None = None
        idle_since = 0.0

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.idle_since = time.monotonic()
            self._watch_headers()
            if len(self.connections) > most:
                idle = [x for x in self.connections if x.is_idle and x is not self]
                min(idle, key=lambda x: x.idle_since, default=self).transport.abort()

        @property
        def is_idle(self) -> bool:
            return not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch_headers()

        def _watch_headers(self) -> None:
            """Start the timer ``waiting`` if the headers of a request are due; stop it once they have arrived."""
            comes = self.conn.their_state is h11.IDLE and not self.transport.is_closing()
            if not comes and self.waiting is not None:
                self.waiting.cancel()
                self.waiting = None
            elif comes and self.waiting is None:
                self.waiting = self.loop.call_later(HEADERS_S, self.transport.abort)

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self.loop.call_later(HEADERS_S, self.transport.abort)  # in case the client does not take its answer

        def on_response_complete(self) -> None:
            self.idle_since = time.monotonic()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            if self.waiting is not None:
                self.waiting.cancel()
            super().connection_lost(exc)

    return Connection


class OncePerMinute(logging.Filter):
    """Filters log lines: passes one line of each kind per minute, with the number of lines left out before it.

    kind: a callable from a log record to the kind of its line. By default the kind is the first
        line of the message before its arguments are filled in. Lines of different loggers, levels
        or exception types always differ in kind.
    """

    def __init__(
        self,
        kind: Callable[[logging.LogRecord], object] = lambda x: str(x.msg).partition("\n")[0],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._kind, self._clock = kind, clock
        self._seen: dict[object, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a log record passes. If so, add the number of lines left out before it to its message."""
        fault = record.exc_info[0] if isinstance(record.exc_info, tuple) else None
        kind, now = (record.name, record.levelno, fault, self._kind(record)), self._clock()
        at, left_out = self._seen.get(kind, (now - MINUTE_S, 0))
        if now - at < MINUTE_S:
            self._seen[kind] = (at, left_out + 1)
            return False
        if len(self._seen) >= MOST_KINDS:
            self._seen.clear()
        self._seen[kind] = (now, 0)
        if left_out:
            record.msg = f"{record.msg} ({left_out:,} more since the last such line)"
        return True


QUIET = OncePerMinute()  # for the log lines of uvicorn and asyncio, in every server of the process

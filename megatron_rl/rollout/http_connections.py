"""Connections of a run's HTTP servers: as many as there are descriptors for, and none that stays without a request.

The oldest idle connection makes room for a new one. A request's headers must have come HEADERS_S
after its first byte, the first request's after the connection's start. An idle connection between
two requests is closed by uvicorn.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import time
from collections.abc import Callable

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 20.0
MOST = 4096  # connections, whatever the limit of descriptors is
BACKLOG = 32  # connections that the kernel holds and that may be accepted in one go, before any is counted
SPARE = 64  # descriptors for files: checkpoints, the store, a module's import
LEAST = 8  # connections, where there are hardly any descriptors
MINUTE_S = 60.0
MOST_KINDS = 1000  # of lines that a log filter remembers


def most_connections() -> int:
    """Return how many connections this process may hold beside what it has open now (``ulimit -n``)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST
    return max(LEAST, min(MOST, soft - len(os.listdir("/proc/self/fd")) - BACKLOG - SPARE))


def protocol_of(most: int) -> type[H11Protocol]:
    """Return uvicorn's protocol over h11 with the bounds of this module; ``most``: connections at a time."""

    class Connection(H11Protocol):
        """Holds one connection."""

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
            """Bound the time until the headers of the request that has begun are whole."""
            comes = self.conn.their_state is h11.IDLE and not self.transport.is_closing()
            if not comes and self.waiting is not None:
                self.waiting.cancel()
                self.waiting = None
            elif comes and self.waiting is None:
                self.waiting = self.loop.call_later(HEADERS_S, self.transport.abort)

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self.loop.call_later(HEADERS_S, self.transport.abort)  # an answer that its client does not take

        def on_response_complete(self) -> None:
            self.idle_since = time.monotonic()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            if self.waiting is not None:
                self.waiting.cancel()
            super().connection_lost(exc)

    return Connection


class OncePerMinute(logging.Filter):
    """Passes the first line of a kind in a minute; the next one that passes says how many were left out.

    kind: what tells two kinds apart; by default the logger, the level and the message's first line
        without its values.
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
        """Return whether a line is logged."""
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


QUIET = OncePerMinute()  # of the server's own libraries, in every server of the process

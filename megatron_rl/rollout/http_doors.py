"""Checks of requests to a run's HTTP server: host, key, body size, and how fast the client takes the answer.

The order keeps the server from reading a body before the key is known:

1. Host and origin. A server on the loopback address answers only if the request's Host header is a
   loopback name. So a web page whose domain was pointed at this address is refused. Requests from a
   page of another origin are refused too.
2. The key. A request without a known key is answered at once, and the connection ends.
3. The body. It has at most ``most_bytes`` bytes, and all bodies in memory together have at most
   ``most_held`` bytes. It must arrive no slower than LEAST_RATE bytes a second.
4. The answer. The client must take it no slower than LEAST_RATE bytes a second.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_rl.distributed.http_access import is_known, is_loopback, names_loopback
from megatron_rl.errors import quoted

GRACE_S = 30.0  # seconds for a body or an answer, beside the time that its size takes at LEAST_RATE
LEAST_RATE = 64 * 1024  # bytes a second
SMALL = 64 * 1024  # bytes of a body that is always accepted: the connection's own buffer holds as much


class Held:
    """Counts the bytes of request bodies in memory, for each client's key.

    most: the limit of the bytes of all keys together; one key may have half of it.
    """

    def __init__(self, most: int) -> None:
        self.most, self._by_key = most, Counter()

    def take(self, key: str, count: int) -> bool:
        """Add ``count`` bytes to the key's count and return True. If that exceeds a limit, add none, return False."""
        if self._by_key.total() + count > self.most or self._by_key[key] + count > self.most // 2:
            return False
        self._by_key[key] += count
        return True

    def give(self, key: str, count: int) -> None:
        """Subtract ``count`` bytes from the key's count, since they are no longer in memory."""
        self._by_key[key] -= count
        if self._by_key[key] <= 0:
            del self._by_key[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Holds the conditions under which a server accepts a request.

    host: the address that the server listens at.
    keys: the keys that clients may present. Empty: any key, or none.
    key_of: a callable that returns a request's key from its headers.
    key_words: the name of the header that has the key, for messages.
    most_bytes: the maximum of bytes of one body.
    setting: the name of the setting of ``most_bytes``, for messages.
    most_held: the maximum of bytes of the bodies of all unanswered requests together; one key may
        have half of it. Bodies up to SMALL bytes are not counted.
    refusal: a callable from a status and a message to the HTTP response that refuses a request.
    """

    host: str
    keys: Sequence[str]
    key_of: Callable[[Mapping[str, str]], str]
    key_words: str
    most_bytes: int
    setting: str
    most_held: int
    refusal: Callable[[int, str], Response]


class Doors:
    """Wraps an ASGI application: passes a request on to it, or refuses the request by the module's checks."""

    def __init__(self, app: ASGIApp, bounds: Bounds) -> None:
        self.app, self.bounds, self.held = app, bounds, Held(bounds.most_held)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if refused := self._refused(headers):
            await self._answer(*refused, scope, receive, send)
            return
        body = _Body(self.bounds, self.held, headers)
        try:
            if refused := await body.read(receive):
                await self._answer(*refused, scope, receive, send)
                return
            await self.app(scope, body.replayed(receive), _in_time(send))
        except _Gone:
            return
        finally:
            body.give()

    def _refused(self, headers: Headers) -> tuple[int, str] | None:
        """Check host, origin and key. Return the status and message of a refusal, or None if all are accepted."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if is_loopback(self.bounds.host) and not names_loopback(host):
            return 403, f"Host {quoted(host)} is no name of this server, which listens on its host's loopback alone"
        if origin is not None and origin.partition("://")[2] != host:
            return 403, f"Origin {quoted(origin)}: pages of other origins are not answered"
        if not is_known(self.bounds.key_of(headers), self.bounds.keys):
            return 401, f"the header {self.bounds.key_words} holds no key of this server"
        return None

    async def _answer(self, status: int, words: str, scope: Scope, receive: Receive, send: Send) -> None:
        response = self.bounds.refusal(status, words)
        response.headers["connection"] = "close"
        await response(scope, receive, _in_time(send))


class _Gone(Exception):
    """Signals that a request's client went away, or takes its answer too slowly."""


class _Body:
    """Reads and keeps the body of one request. Only the event loop's thread may use it.

    held: the server's counter of the bytes of all bodies in memory.
    counted: how many of this body's bytes ``held`` has counted.
    """

    def __init__(self, bounds: Bounds, held: Held, headers: Headers) -> None:
        length = headers.get("content-length", "")
        self.bounds, self.held, self.counted, self._content = bounds, held, 0, b""
        self._key = bounds.key_of(headers)
        self._announced = int(length[:20]) if length.isascii() and length.isdecimal() else 0

    async def read(self, receive: Receive) -> tuple[int, str] | None:
        """Read the whole body. Return the status and message of a refusal, or None if the body is accepted.

        If a body is refused for its size, its rest is read and dropped. Otherwise the client would
        see a broken connection while it sends, and would send again in vain.

        Raises _Gone if the client goes away.
        """
        parts: list[bytes] = []
        size, more, began, refused = 0, True, time.monotonic(), self._too_large(self._announced)
        while more:
            left = began + GRACE_S + (0 if refused else size / LEAST_RATE) - time.monotonic()
            try:
                message = await asyncio.wait_for(receive(), max(0.0, left))
            except TimeoutError:
                return refused or (408, f"{size:,} bytes of the body came in {time.monotonic() - began:.0f} s")
            if message["type"] == "http.disconnect":
                raise _Gone
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            refused = refused or self._too_large(size) or self._too_many(size)
            if refused:
                parts.clear()
            else:
                parts.append(part)
        self._content = b"".join(parts)
        return refused

    def _too_large(self, size: int) -> tuple[int, str] | None:
        most = self.bounds.most_bytes
        if size <= most:
            return None
        words = f"the body has {size:,} bytes, and {self.bounds.setting} allows {most:,}; send less at once"
        return 413, words

    def _too_many(self, size: int) -> tuple[int, str] | None:
        """Count the ``size`` bytes of the body that have arrived so far.

        Return None, or the status and message of a refusal if the bodies in memory exceed their
        limit.
        """
        if size > SMALL:
            if not self.held.take(self._key, size - self.counted):
                most = self.held.most
                return 429, f"bodies of unanswered requests hold {most:,} bytes, or half of it for this key; try again"
            self.counted = size
        return None

    def give(self) -> None:
        """Subtract the body's bytes from the server's count of bytes in memory."""
        self.held.give(self._key, self.counted)

    def replayed(self, receive: Receive) -> Receive:
        """Return an ASGI ``receive`` callable. Its first call gives the whole body, later calls further messages."""
        body: list[Message] = [{"type": "http.request", "body": self._content, "more_body": False}]
        self._content = b""

        async def whole() -> Message:
            return body.pop() if body else await receive()

        return whole


def _in_time(send: Send) -> Send:
    """Return an ASGI ``send`` callable that raises _Gone if the client takes the answer too slowly."""

    async def sending(message: Message) -> None:
        try:
            await asyncio.wait_for(send(message), GRACE_S + len(message.get("body", b"")) / LEAST_RATE)
        except TimeoutError:
            raise _Gone from None

    return sending

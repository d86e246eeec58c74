"""Checks a request on its way into a run's HTTP server: its host, its key, and its body within bounds.

In this order, so that who has no key has no body read, and a page of a browser never reaches a
server on its host:

1. A server on this host's loopback answers under its own names alone (no page's name that was
   pointed here), and no request that a page of another origin makes.
2. The key. Who has none is answered at once, and the connection ends.
3. The body: of ``most_bytes`` at most, all of them together within ``most_held``, and no slower
   than LEAST_RATE.
4. The answer, which is taken no slower than that.
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

GRACE_S = 30.0  # for a body or an answer, beside what its size takes at LEAST_RATE
LEAST_RATE = 64 * 1024  # bytes a second
SMALL = 64 * 1024  # bytes of a body that is always taken: as much lies in the connection's own buffer


class Held:
    """Counts the bytes that are held for each key. ``most``: as many in all, and half of them for one key."""

    def __init__(self, most: int) -> None:
        self.most, self._by_key = most, Counter()

    def take(self, key: str, count: int) -> bool:
        """Count bytes that are held from now on; return False, and count none, where they are too many."""
        if self._by_key.total() + count > self.most or self._by_key[key] + count > self.most // 2:
            return False
        self._by_key[key] += count
        return True

    def give(self, key: str, count: int) -> None:
        """Count bytes that are held no longer."""
        self._by_key[key] -= count
        if self._by_key[key] <= 0:
            del self._by_key[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Holds who is let in, and how much of it.

    host: the address that the server listens at. keys: those that clients may present; none: any.
    key_of: returns a request's key from its headers. key_words: says where a key is looked for.
    most_bytes: of a body; setting: the configuration's name of that. most_held: bytes of all bodies
        together whose request is not answered, half of it for one key; SMALL ones are not counted.
    refusal: makes a refusal's answer of a status and a message.
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
    """Lets a request in, or answers it with what refuses it (see the module)."""

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
        """Return the status and the words by which a request is refused before its body is read; None: it is not."""
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
    """Ends a request whose client went away, or takes its answer too slowly."""


class _Body:
    """Reads a request's body; ``counted``: the bytes of it that are counted as held. In the event loop alone."""

    def __init__(self, bounds: Bounds, held: Held, headers: Headers) -> None:
        length = headers.get("content-length", "")
        self.bounds, self.held, self.counted, self._content = bounds, held, 0, b""
        self._key = bounds.key_of(headers)
        self._announced = int(length[:20]) if length.isascii() and length.isdecimal() else 0

    async def read(self, receive: Receive) -> tuple[int, str] | None:
        """Read the whole body; return the status and the words of a refusal. Raises _Gone where the client goes away.

        The rest of a body that is refused for its size is read and dropped: a client that is cut
        off while it sends sees a broken connection, of which it cannot know that sending again is
        in vain.
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
        words = f"the body has {size:,} bytes, and {self.bounds.setting} allows {most:,}; send fewer data at once"
        return 413, words

    def _too_many(self, size: int) -> tuple[int, str] | None:
        """Count a body of ``size`` bytes so far as held, in place of what was counted; return a refusal if too many."""
        if size > SMALL:
            if not self.held.take(self._key, size - self.counted):
                most = self.held.most
                return 429, f"bodies of unanswered requests hold {most:,} bytes, or half of it for this key; try again"
            self.counted = size
        return None

    def give(self) -> None:
        """Count the body as held no longer."""
        self.held.give(self._key, self.counted)

    def replayed(self, receive: Receive) -> Receive:
        """Return what gives the application the whole body at once, and then what comes."""
        body: list[Message] = [{"type": "http.request", "body": self._content, "more_body": False}]
        self._content = b""

        async def whole() -> Message:
            return body.pop() if body else await receive()

        return whole


def _in_time(send: Send) -> Send:
    """Return a ``send`` that gives up on a client which does not take what it asked for."""

    async def sending(message: Message) -> None:
        try:
            await asyncio.wait_for(send(message), GRACE_S + len(message.get("body", b"")) / LEAST_RATE)
        except TimeoutError:
            raise _Gone from None

    return sending

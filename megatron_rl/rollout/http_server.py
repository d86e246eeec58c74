"""Parts of a run's HTTP servers: a bound on bodies, their JSON, clients' keys, and a listening thread."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_rl.errors import ConfigError, RunError
from megatron_rl.json_text import check, parse_json

if TYPE_CHECKING:  # an extra (`serve`), which only a run that serves needs
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

START_S = 60.0  # until a server listens


class BodyLimit:
    """Refuses a request whose body is larger than ``most`` bytes, without holding it in memory.

    The rest of such a body is read and dropped: a client that is cut off while it sends sees a broken connection, of
    which it cannot know that sending again is in vain. ``key`` names the setting.
    """

    def __init__(self, app: ASGIApp, most: int, key: str) -> None:
        self.app, self.most, self.key = app, most, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.responses import JSONResponse

        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
            if size > self.most:
                parts.clear()
            else:
                parts.append(message.get("body", b""))
        if size > self.most:
            text = f"the body has {size:,} bytes, and {self.key} allows {self.most:,}; send fewer data at once"
            await JSONResponse({"detail": text}, status_code=413)(scope, receive, send)
            return
        body: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

        async def whole() -> Message:
            return body.pop() if body else await receive()

        await self.app(scope, whole, send)


def keys_in(variable: str | None, *, setting: str) -> tuple[str, ...]:
    """Return the keys, between commas, in an environment variable; none where ``variable`` is None.

    Raises ConfigError for a variable that holds none; ``setting`` names it in the configuration.
    """
    keys = tuple(key.strip() for key in os.environ.get(variable or "", "").split(",") if key.strip())
    if variable is not None and not keys:
        raise ConfigError(f"{setting}={variable} names a variable that holds no key; set it, or null for no key")
    return keys


def is_known(key: str, keys: Sequence[str]) -> bool:
    """Return whether a client's key is one of ``keys``, or there are none."""
    return not keys or any(hmac.compare_digest(key.encode(), known.encode()) for known in keys)


def json_object(content: bytes, error: type[Exception]) -> dict:
    """Return the JSON object of a body, {} of an empty one. Raises ``error`` for anything else (``json_text``)."""
    return check(parse_json(content or b"{}", "the body", error=error), "the body", dict, error=error)


def is_loopback(host: str) -> bool:
    """Return whether an address is this host's own loopback."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def listening(app: ASGIApp, host: str, port: int, *, section: str) -> Iterator[str]:
    """Serve an application in a thread within the block; yield its address, ``http://host:port``.

    port: 0 for any free one. section: holds the setting ``port``, for messages.

    Raises RunError where it cannot listen.
    """
    import uvicorn

    server = uvicorn.Server(
        uvicorn.Config(
            app, host=host, port=port, log_level="warning", access_log=False, timeout_keep_alive=75, lifespan="off"
        )
    )
    thread = threading.Thread(target=server.run, name="front", daemon=True)
    thread.start()
    ends_at = time.monotonic() + START_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > ends_at:
            raise RunError(
                f"the server cannot listen at {host}, {section}.port={port}; see above, or name another port"
            )
        time.sleep(0.02)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10.0)

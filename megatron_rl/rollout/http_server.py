"""Helpers of a run's HTTP servers: a reader of JSON bodies, and a function that serves an application in a thread."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_rl.errors import RunError
from megatron_rl.json_text import check, parse_json

if TYPE_CHECKING:  # starlette belongs to the extra `serve`, which only a run with an HTTP server needs
    from starlette.types import ASGIApp

START_S = 60.0  # seconds until a server listens
GOODBYE_S = 2  # seconds for answers that are under way when the server ends


def json_object(content: bytes, error: type[Exception]) -> dict:
    """Return the JSON object that a request's body holds; {} for an empty body.

    Raises the exception class ``error`` for any other body, and for JSON that ``json_text.py``
    refuses, such as NaN or a key given twice.
    """
    return check(parse_json(content or b"{}", "the body", error=error), "the body", dict, error=error)


@contextlib.contextmanager
def listening(app: ASGIApp, host: str, port: int, *, section: str) -> Iterator[str]:
    """Serve an ASGI application in a thread during the ``with`` block; yield its address, ``http://host:port``.

    port: the port to listen at; 0 for any free port.
    section: the configuration section that has ``port``, for messages.

    Raises RunError if the server cannot listen.
    """
    import uvicorn

    from megatron_rl.rollout.http_connections import BACKLOG, QUIET, hold_waiting, most_connections, protocol_of

    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=GOODBYE_S,
            lifespan="off",
            ws="none",
            loop="asyncio",
            backlog=BACKLOG,
            http=protocol_of(most_connections()),
        )
    )
    # Start the server in a thread, and wait until it listens.
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(QUIET)
    thread = threading.Thread(target=server.run, name="front", daemon=True)
    thread.start()
    ends_at = time.monotonic() + START_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > ends_at:
            raise RunError(
                f"the server cannot listen at {host}, {section}.port={port}; see above, or name another port"
            )
        time.sleep(0.02)
    listener = server.servers[0].sockets[0]
    hold_waiting(listener)
    host, port = listener.getsockname()[:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10.0)

"""HTTP requests to a vLLM server: JSON, one deadline per request, and an error class for each kind of failure.

Each request has its own connection. So cutting the connection ends the request here and on the
server, since vLLM aborts requests of a client that is gone. Proxies and redirects are not followed.
So the key and the prompts go only to the given address.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import urllib.parse

from megatron_rl.errors import ConfigError
from megatron_rl.rollout.engines.replica import ReplicaLost, RequestRefused
from megatron_rl.rollout.vllm.server_command import DEV_MODE, SCALE_OUT

CONNECT_S = 5.0
TOLD_CHARACTERS = 1500  # characters of a server's error text that are quoted
BUSY = (408, 425, 429)  # statuses of requests that may succeed later


class NotListening(ReplicaLost):
    """Raised if nothing accepts connections at the server's address."""


class ServerFailed(ReplicaLost):
    """Raised if a server answers that it cannot serve (HTTP 5xx). For /health this means that its engine is dead."""


class MissingRoute(RequestRefused):
    """Raised if the server lacks a route, because of its settings or its release."""


class Exchange:
    """Runs one HTTP request. ``cut`` ends the request early, from any thread and at any time, also repeatedly."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.was_cut = False
        self.timed_out = False

    def cut(self) -> None:
        with self._lock:
            self.was_cut = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # the connection may have ended by itself
                    self._socket.shutdown(socket.SHUT_RDWR)

    def run(
        self, connection: http.client.HTTPConnection, method: str, path: str, body, headers, timeout_s: float | None
    ) -> tuple[int, bytes]:
        """Send the request; return the answer's status and body. Raises OSError or HTTPException.

        If the deadline of ``timeout_s`` seconds caused the error, the attribute ``timed_out`` is
        True.
        """
        # The socket's own time-out counts from byte to byte, so a slow stream of bytes would never exceed it.
        watchdog = threading.Timer(timeout_s or 0.0, self._expire)
        watchdog.daemon = True
        if timeout_s is not None:
            watchdog.start()
        try:
            connection.connect()
            connection.sock.settimeout(timeout_s)
            with self._lock:
                self._socket = connection.sock
            if self.was_cut:
                raise ConnectionAbortedError("the request was given up")
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            content = answer.read()
            if self.was_cut:
                raise ConnectionAbortedError("the request was given up")
            if answer.length is None and not answer.chunked:
                # Without a length, http.client takes the end of the connection for the end of the body. So a
                # cut answer would look whole.
                raise http.client.HTTPException("an answer without a length, as one that was cut has")
            return answer.status, content
        finally:
            watchdog.cancel()
            with self._lock:
                self._socket = None
            connection.close()

    def _expire(self) -> None:
        self.timed_out = True
        self.cut()


class Server:
    """Holds a server's address and key, and sends requests to the server."""

    def __init__(self, url: str, *, api_key: str | None, key_setting: str) -> None:
        """Store the address and the key, without connecting. Raises ConfigError for an invalid address or key.

        key_setting: the setting that names the key's environment variable. Messages name it, never
            the key.
        """
        parts = urllib.parse.urlsplit(url)
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.username
            or parts.query
            or parts.fragment
        ):
            raise ConfigError(
                f"rollout.servers holds {url!r}, which is no server's address; write it as http://HOST:PORT"
            )
        if api_key is not None and (not api_key.isascii() or not api_key.isprintable() or not api_key.strip()):
            raise ConfigError(
                f"the key that {key_setting} names is empty or holds characters that no HTTP header can carry"
            )
        self.url = url.rstrip("/")
        self.host, self.port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self.key_setting = key_setting
        self._tls, self._folder, self._key = parts.scheme == "https", parts.path.rstrip("/"), api_key

    def call(
        self, method: str, path: str, body: object = None, *, timeout_s: float | None, exchange: Exchange | None = None
    ) -> object:
        """Send a request; return the answer's JSON value, None for an empty body. Raises ReplicaLost or RequestRefused.

        timeout_s: seconds for the whole request. None: no limit, for a caller that itself ends the
            request by ``exchange.cut``.
        exchange: the object that runs the request, and whose ``cut`` ends it early; None: a new
            one.
        """
        request = f"{self.url}: {method} {path}"
        answer = self._content(method, path, body, timeout_s, exchange or Exchange())
        try:
            return json.loads(answer) if answer.strip() else None
        except ValueError as error:
            raise ReplicaLost(
                f"{request}: {len(answer)} bytes that are not JSON, {self._told(text_of(answer))!r}"
            ) from error

    def text(self, path: str, *, timeout_s: float) -> str:
        """Return the text of the answer to a GET request. Raises ReplicaLost and RequestRefused."""
        return self._content("GET", path, None, timeout_s, Exchange()).decode(errors="replace")

    def _content(self, method: str, path: str, body: object, timeout_s: float | None, exchange: Exchange) -> bytes:
        headers = {"Accept": "application/json", "Connection": "close"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        content = None if body is None else json.dumps(body).encode()
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=CONNECT_S if timeout_s is None else min(CONNECT_S, timeout_s))
        request = f"{self.url}: {method} {path}"
        # Send the request, and turn each failure into its error class.
        try:
            status, answer = exchange.run(connection, method, self._folder + path, content, headers, timeout_s)
        except ConnectionRefusedError as error:
            raise NotListening(f"{self.url}: connection refused, nothing listens there") from error
        except (OSError, http.client.HTTPException) as error:
            if exchange.timed_out or isinstance(error, TimeoutError):
                raise ReplicaLost(f"{request} was not answered in {timeout_s:g} s") from error
            if exchange.was_cut:
                raise ReplicaLost(f"{request} was given up here") from error
            raise ReplicaLost(
                f"{request}: the connection broke, {type(error).__name__}: {self._told(str(error))}"
            ) from error
        if not 200 <= status < 300:
            raise self._error(request, path, status, answer)
        return answer

    def _told(self, text: str) -> str:
        text = text if self._key is None else text.replace(self._key, "***")
        return text if len(text) <= TOLD_CHARACTERS else f"{text[:TOLD_CHARACTERS]} ..."

    def _error(self, what: str, path: str, status: int, answer: bytes) -> Exception:
        text = self._told(text_of(answer))
        if status >= 500:
            return ServerFailed(f"{what}: {status}, {text}")
        if status in BUSY:
            return ReplicaLost(f"{what}: {status}, {text}")
        if status == 403 and SCALE_OUT in text or status in (404, 405) and path.startswith("/inference/"):
            return MissingRoute(f"{what}: {status}, {text}. Start the server with {SCALE_OUT} (vLLM 0.29 or newer)")
        if status in (401, 403):
            sent = "no key was sent" if self._key is None else "the key that was sent is not the server's"
            return RequestRefused(
                f"{what}: {status}, {sent}; set {self.key_setting} to the name of the environment variable that holds "
                "it"
            )
        if status in (404, 405):
            return MissingRoute(
                f"{what}: {status}, {text}. The server has this route only with {'='.join(DEV_MODE)} in its environment"
            )
        return RequestRefused(f"{what}: {status}, {text}")


def text_of(answer: bytes) -> str:
    """Return the message in the body of an error response from vLLM, FastAPI or a proxy."""
    text = answer.decode(errors="replace").strip()
    try:
        message = json.loads(text)
    except ValueError:
        return text or "no text"
    for name in ("error", "detail", "message"):
        if isinstance(message, dict) and name in message:
            message = message[name]
    return message if isinstance(message, str) else json.dumps(message)

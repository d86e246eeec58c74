"""The HTTP server of ``megatron-rl watch RUN``: sends a page and the run's data to a browser on this host."""

from __future__ import annotations

import contextlib
import http
import http.server
import socket
import sys
import threading
import urllib.parse

from megatron_rl.errors import ConfigError, quoted
from megatron_rl.observability.report import PAGE
from megatron_rl.watch.run_folder import RunFolder, as_json

HOST = "127.0.0.1"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
# Nothing from elsewhere is loaded or run, and no other page may frame this one.
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; frame-ancestors 'none'"


class WatchServer(http.server.ThreadingHTTPServer):
    """Serves a run's page at 127.0.0.1 alone. ``port``: 0 takes a free one. Raises ConfigError if the port is taken."""

    daemon_threads = True
    request_queue_size = 128  # connections that are not accepted yet; the default, 5, drops a burst
    most_connections = 64

    def __init__(self, run: RunFolder, port: int) -> None:
        self.run = run
        self.reader = threading.Lock()  # makes one answer from the run's files at a time: each may take much memory
        self._open: dict[socket.socket, None] = {}  # the most recently used connection is last
        self._guard = threading.Lock()
        try:
            super().__init__((HOST, port), WatchHandler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"port {port} of {HOST} cannot be listened on ({error}); name another by --port"
            ) from error

    def process_request(self, request: socket.socket, client_address: object) -> None:
        """Answer a connection in a new thread. If too many are open, close the connection idle the longest."""
        with self._guard:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > self.most_connections else None
            if oldest is not None:
                del self._open[oldest]
                with contextlib.suppress(OSError):  # it has gone already
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def is_used(self, connection: socket.socket) -> None:
        with self._guard:
            if connection in self._open:
                del self._open[connection]
                self._open[connection] = None

    def shutdown_request(self, request: socket.socket) -> None:
        with self._guard:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the error of a browser that closed its page; print any other error of an answer, and go on."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"


class WatchHandler(http.server.BaseHTTPRequestHandler):
    """Answers GET for the page's files and for /api/run, /api/metrics, /api/rollout and /api/completions."""

    server: WatchServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        self.server.is_used(self.connection)
        hosts = [name.rsplit(":", 1)[0] for name in self.headers.get_all("Host", [])]
        if hosts not in ([HOST], ["localhost"]):
            # A page from elsewhere whose name was pointed at this host could read the run.
            self._answer(http.HTTPStatus.FORBIDDEN, f"this server is {self.server.address}".encode(), "text/plain")
            return
        try:
            address = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(address.query))
        except ValueError as error:
            said = f"{quoted(self.path)} is no address: {error}"
            self._answer(http.HTTPStatus.BAD_REQUEST, said.encode("utf-8", "replace"), "text/plain")
            return
        status = http.HTTPStatus.OK
        try:
            with self.server.reader:
                content, kind = self._content(address.path, query)
        except FileNotFoundError as error:
            status, content, kind = http.HTTPStatus.NOT_FOUND, str(error).encode("utf-8", "replace"), "text/plain"
        except (ValueError, OSError) as error:
            status = http.HTTPStatus.UNPROCESSABLE_ENTITY
            content, kind = str(error).encode("utf-8", "replace"), "text/plain"
        self._answer(status, content, kind)

    def _content(self, path: str, query: dict[str, str]) -> tuple[bytes, str]:
        """Return (bytes, MIME type) of an answer. Raises FileNotFoundError or ValueError (malformed query or file)."""
        run = self.server.run
        match path:
            case "/api/run":
                return as_json(run.facts()), "application/json"
            case "/api/metrics":
                return as_json(run.rows(_number(query, "offset"))), "application/json"
            case "/api/rollout":
                return as_json(run.rollout(_number(query, "number"))), "application/json"
            case "/api/completions":
                return as_json(run.completions()), "application/json"
        files = {f"/{file.name}": file for file in PAGE.iterdir()}
        file = files.get("/watch.html" if path == "/" else path)
        if file is None:
            raise FileNotFoundError(f"{path} is no part of this page")
        return file.read_bytes(), TYPES[file.suffix]

    def _answer(self, status: http.HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: the page asks every two seconds."""


def _number(query: dict[str, str], name: str) -> int:
    text = query.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise ValueError(f"{name}={text[:40]!r} is no whole number")
    return int(text)

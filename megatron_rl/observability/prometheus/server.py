"""The HTTP server that Prometheus reads: GET /metrics, and GET /healthz, which answers "ok".

One connection brings one request and ends. At most MOST_CONNECTIONS are open, each in its own
thread. A further connection ends the oldest one. No connection lives longer than REQUEST_S seconds,
however slowly its client writes or reads. So no client can exhaust the run's threads or descriptors.

A server on the loopback address answers only requests whose Host header is a loopback name. So a
web page whose domain name was pointed at this host cannot read the metrics.
"""

from __future__ import annotations

import contextlib
import http
import http.server
import logging
import socket
import socketserver
import sys
import threading
import time
import urllib.parse
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.openmetrics import exposition as openmetrics

from megatron_rl.distributed.http_access import is_known, is_loopback, names_loopback
from megatron_rl.errors import ConfigError, quoted

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 16
REQUEST_S = 10.0  # the longest life of a connection
LOOK_S = 0.2  # between two checks for overdue connections
GOODBYE_S = 1.0  # for unfinished answers when the run ends
PLAIN_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus' text format, version 0.0.4
BEARER = "bearer "


class MetricsServer(http.server.ThreadingHTTPServer):
    """Answers requests for the metrics of a registry, in threads that end with the process.

    address, port: the address to listen on; port 0 takes any free one.
    keys: the access keys, of which a client must send one; () if clients need none.

    Raises ConfigError for an address or a port that cannot be listened on.
    """

    daemon_threads, block_on_close = True, False
    request_queue_size = 32

    def __init__(self, registry: CollectorRegistry, address: str, port: int, keys: Sequence[str]) -> None:
        self.registry, self.keys = registry, tuple(keys)
        self._open: dict[socket.socket, float] = {}  # since when each is open, the oldest first
        self._guard = threading.Lock()
        self.address_family, place = _resolved(address, port)
        try:
            super().__init__(place, MetricsHandler)
        except OSError as error:
            other = "name another by metrics.prometheus_port, or 0 for any free one"
            raise ConfigError(
                f"metrics.prometheus_port={port}: {address}:{port} cannot be listened on ({error.strerror}); {other}"
            ) from error
        self.is_local = is_loopback(place[0])
        self._loop = threading.Thread(target=self.serve_forever, args=(LOOK_S,), name="metrics", daemon=True)

    def server_bind(self) -> None:
        """Bind to the port without HTTPServer's lookup of the host's name, which a slow name server would delay."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def start(self) -> None:
        """Begin to answer requests, in a thread."""
        self._loop.start()

    @property
    def url(self) -> str:
        """Return the URL of the metrics."""
        host = f"[{self.server_name}]" if ":" in self.server_name else self.server_name
        return f"http://{host}:{self.server_port}/metrics"

    def get_request(self) -> tuple[socket.socket, object]:
        """Accept a connection. If that fails, as without a free descriptor, wait LOOK_S seconds, then raise OSError.

        The server's loop then tries again; without the wait it would do so at once.
        """
        try:
            return super().get_request()
        except OSError:
            time.sleep(LOOK_S)
            raise

    def process_request(self, request: socket.socket, client_address: object) -> None:
        """Answer a connection in a new thread; if more than MOST_CONNECTIONS are open, end the oldest."""
        with self._guard:
            self._open[request] = time.monotonic()
            surplus = list(self._open)[:-MOST_CONNECTIONS]
            for oldest in surplus:
                self._end(oldest)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """End connections older than REQUEST_S seconds; the server's loop calls this every LOOK_S seconds."""
        with self._guard:
            since = time.monotonic() - REQUEST_S
            for request in [each for each, begun in self._open.items() if begun < since]:
                self._end(request)

    def _end(self, request: socket.socket) -> None:
        """Shut down a connection, so that the thread that waits for it ends; the caller holds the lock ``_guard``."""
        del self._open[request]
        with contextlib.suppress(OSError):  # its client has gone already
            request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: socket.socket) -> None:
        with self._guard:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log an error in an answer, unless the client went away; the run goes on."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            log.exception("an answer to a scrape of the metrics failed; the run goes on")

    def close(self) -> None:
        """Stop the server and free the port; unfinished answers get GOODBYE_S seconds to end."""
        if self._loop.is_alive():
            self.shutdown()
        self.server_close()
        ends_at = time.monotonic() + GOODBYE_S
        while self._open and time.monotonic() < ends_at:
            time.sleep(0.01)
        with self._guard:
            for request in list(self._open):
                self._end(request)


class MetricsHandler(http.server.BaseHTTPRequestHandler):
    """Answers one request for /metrics or /healthz."""

    server: MetricsServer
    timeout = REQUEST_S

    def version_string(self) -> str:
        """Return the text of the answers' Server header, without a release number."""
        return "megatron_rl"

    def do_GET(self) -> None:
        refusal = self._refusal()
        if refusal is not None:
            self._answer(*refusal)
            return
        if urllib.parse.unquote(self.path.partition("?")[0]) == "/healthz":
            self._answer(http.HTTPStatus.OK, b"ok\n", "text/plain; charset=utf-8")
            return
        if "application/openmetrics-text" in self.headers.get("Accept", ""):
            content, kind = openmetrics.generate_latest(self.server.registry), openmetrics.CONTENT_TYPE_LATEST
        else:
            content, kind = exposition.generate_latest(self.server.registry), PLAIN_TYPE
        self._answer(http.HTTPStatus.OK, content, kind)

    def _refusal(self) -> tuple[http.HTTPStatus, bytes, str] | None:
        """Return (status, body, content type) of the answer that refuses the request; None if it is allowed."""
        text, path = "text/plain; charset=utf-8", urllib.parse.unquote(self.path.partition("?")[0])
        hosts = self.headers.get_all("Host", [])
        if self.server.is_local and not all(names_loopback(host) for host in hosts):
            said = f"this server is {self.server.url}, on its host's loopback alone\n"
            return http.HTTPStatus.FORBIDDEN, said.encode(), text
        if path == "/healthz":
            return None
        if path != "/metrics":
            said = f"{quoted(path)} is not served; ask for /metrics or /healthz\n"
            return http.HTTPStatus.NOT_FOUND, said.encode("utf-8", "replace"), text
        # The library reads headers as Latin-1, and keys of an environment variable are UTF-8.
        given = self.headers.get("Authorization", "").encode("latin-1", "replace").decode("utf-8", "surrogateescape")
        key = given[len(BEARER) :].strip() if given[: len(BEARER)].lower() == BEARER else ""
        if not is_known(key, self.server.keys):
            said = "the header Authorization: Bearer KEY holds no key of this server (metrics.prometheus_key_env)\n"
            return http.HTTPStatus.UNAUTHORIZED, said.encode(), text
        return None

    def _answer(self, status: http.HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        if status is http.HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: Prometheus sends a request every few seconds."""


def _resolved(address: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Return (address family, (numeric address, port)) of ``address``; raise ConfigError if it has none."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"metrics.prometheus_address={quoted(address)} is no address of this host ({error}); name 127.0.0.1 for "
            "this host alone, or 0.0.0.0 for every interface"
        ) from error
    return family, place[:2]

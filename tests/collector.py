"""An OpenTelemetry collector in a thread: takes OTLP over HTTP, and keeps what it was sent."""

import contextlib
import gzip
import http.server
import threading
from collections.abc import Iterator
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Sent(NamedTuple):
    """A span as it came."""

    name: str
    trace: bytes
    number: bytes
    parent: bytes
    start_ns: int
    end_ns: int
    facts: dict[str, object]
    failed: bool

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class Collector:
    """Holds the requests that came, each (path, headers, body), the body decompressed.

    status: of every answer.
    may_answer: no request is answered before it is set.
    """

    def __init__(self, status: int) -> None:
        self.status, self.requests, self.may_answer = status, [], threading.Event()
        self.may_answer.set()
        self.url = ""

    def spans(self) -> list[Sent]:
        """Return the spans of all requests, by their starts; a root before a span that starts with it."""
        found = []
        for _, _, body in self.requests:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    facts = {each.key: plain(each.value) for each in span.attributes}
                    numbers = (span.trace_id, span.span_id, span.parent_span_id)
                    times = (span.start_time_unix_nano, span.end_time_unix_nano)
                    found.append(Sent(span.name, *numbers, *times, facts, span.status.code == 2))
        return sorted(found, key=lambda span: (span.start_ns, span.parent != b""))

    def resources(self) -> list[dict[str, object]]:
        """Return the attributes of each resource that came."""
        parts = [ExportTraceServiceRequest.FromString(body).resource_spans for _, _, body in self.requests]
        return [{a.key: plain(a.value) for a in each.resource.attributes} for part in parts for each in part]


def plain(value) -> object:
    return getattr(value, value.WhichOneof("value"))


@contextlib.contextmanager
def collector(status: int = 200) -> Iterator[Collector]:
    """Serve a collector on a free port of this host."""
    held = Collector(status)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            held.may_answer.wait(60)
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            held.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            with contextlib.suppress(BrokenPipeError):
                self.send_response(held.status)
                self.send_header("content-length", "0")
                self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        held.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield held
        finally:
            held.may_answer.set()
            server.shutdown()
            thread.join()

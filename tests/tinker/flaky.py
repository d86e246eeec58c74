"""A proxy before the server that loses, doubles and delays requests and answers, by a seed."""

from __future__ import annotations

import random
import threading
import urllib.error
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.patience import patient

FAULTS = ("lose the request", "lose the answer", "send twice", "answer 503")
KEPT = ("content-type", "x-api-key", "accept-encoding", "content-encoding")


class Flaky:
    """Forwards to ``target``, and makes a fault of every third request that is made to train, step, save or sample."""

    def __init__(self, target: str, seed: int) -> None:
        self.target, self.random, self.lock = target, random.Random(seed), threading.Lock()
        self.made: Counter[str] = Counter()
        flaky = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                flaky.handle(self, self.rfile.read(int(self.headers.get("content-length", 0))))

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True

    def __enter__(self) -> Flaky:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def handle(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        with self.lock:
            fault = self.random.choice((*FAULTS, *[None] * 2 * len(FAULTS)))
            self.made[fault or "none"] += 1
        if fault == "lose the request":
            return _hang_up(handler)
        if fault == "answer 503":
            return _answer(handler, 503, "application/json", b'{"detail": "a proxy had a bad day"}')
        for _ in range(2 if fault == "send twice" else 1):
            status, kind, content = self._forward(handler, body)
        if fault == "lose the answer":
            return _hang_up(handler)
        _answer(handler, status, kind, content)

    def _forward(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, str, bytes]:
        headers = {name: value for name, value in handler.headers.items() if name.lower() in KEPT}
        data = body if handler.command == "POST" else None
        request = urllib.request.Request(self.target + handler.path, data, headers, method=handler.command)
        try:
            with urllib.request.urlopen(request, timeout=patient(60)) as answer:
                return answer.status, answer.headers["content-type"], answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers["content-type"], error.read()


def _hang_up(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.connection.close()


def _answer(handler: BaseHTTPRequestHandler, status: int, kind: str, content: bytes) -> None:
    handler.send_response(status)
    handler.send_header("content-type", kind)
    handler.send_header("content-length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)

"""A fake vLLM server for tests, each route of which a test can make go wrong.

It has the routes that server_replica.py uses, and answers from memory.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

DESCRIPTION = {"vocab_size": 64, "max_model_tokens": 32, "logprobs_mode": "processed_logprobs", "dtype": "float32"}


def generate(body: dict) -> dict:
    """Return a well-behaved answer: ``n`` samples of three tokens, the last one a stop token."""
    content = [{"token_id": token, "logprob": -0.25 * token} for token in (1, 2, 9)]
    choice = {"token_ids": [1, 2, 9], "logprobs": {"content": content}, "finish_reason": "stop"}
    versions = [{"version": "3", "start": 0, "end": 3}]
    return {
        "choices": [
            {**choice, "index": index, "weight_versions": versions} for index in range(body["sampling_params"]["n"])
        ]
    }


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers each request by its route's entry in ``server.routes``.

    A value is sent as JSON, a function gets the body and gives such a value, and a fault gets the handler itself.
    """

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size)) if size else None
        self.server.seen.append((self.command, self.path, body, dict(self.headers)))
        found = self.server.routes.get(self.path.partition("?")[0], Answer(404, {"detail": "Not Found"}))
        if isinstance(found, Fault):
            found.act(self)
        elif isinstance(found, Answer):
            self.answer(found.status, found.content)
        else:
            self.answer(200, found(body) if callable(found) else found)

    def answer(self, status: int, content: object) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None:
        """Write nothing: pytest's output is for the tests."""


class Answer:
    def __init__(self, status: int, content: object) -> None:
        self.status, self.content = status, content


class Fault:
    """An act of the server in place of its usual answer."""

    def __init__(self, act: Callable[[Handler], None]) -> None:
        self.act = act


def in_turn(*answers: Answer) -> Fault:
    """Return a fault that gives one answer after the other, and the last one from then on."""
    left = list(answers)

    def act(handler: Handler) -> None:
        found = left.pop(0) if len(left) > 1 else left[0]
        handler.answer(found.status, found.content)

    return Fault(act)


def _hang(handler: Handler) -> None:
    handler.server.ending.wait()


def _drip(handler: Handler) -> None:
    """Send a byte now and then.

    A client with a time-out between bytes alone would wait for ever.
    """
    handler.send_response(200)
    handler.send_header("Content-Length", "10000")
    handler.end_headers()
    with contextlib.suppress(OSError):
        while not handler.server.ending.wait(0.05):
            handler.wfile.write(b" ")


def _drip_headers(handler: Handler) -> None:
    with contextlib.suppress(OSError):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        while not handler.server.ending.wait(0.05):
            handler.wfile.write(b"X-A: b\r\n")
            time.sleep(0.01)


def _drop(handler: Handler) -> None:
    """Send half an answer, and end the connection."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)


def _reset(handler: Handler) -> None:
    """Reset the connection without a word."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    handler.connection.close()


def _half_without_length(handler: Handler) -> None:
    """Send half an answer without a length, so that the cut answer looks whole."""
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b'{"choices": [{"index"')


def _cut_in_the_headers(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nServer: uvi")
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)


def _garble(handler: Handler) -> None:
    with contextlib.suppress(OSError):
        handler.wfile.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")


FAULTS = {
    "hang": Fault(_hang),
    "drip": Fault(_drip),
    "drip headers": Fault(_drip_headers),
    "drop": Fault(_drop),
    "reset": Fault(_reset),
    "half without length": Fault(_half_without_length),
    "garble": Fault(_garble),
    "cut in the headers": Fault(_cut_in_the_headers),
}


class FakeVllm(http.server.ThreadingHTTPServer):
    """A vLLM server in threads of this process, without a model.

    ``routes`` may be changed at any time; ``seen`` holds (method, path, body, headers) of every request.
    """

    daemon_threads = True

    def __init__(self, **routes: object) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ending = threading.Event()
        self.seen: list[tuple[str, str, dict | None, dict]] = []
        self.routes: dict[str, object] = {
            "/health": b"",
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": [{"id": "m", "max_model_len": 32}]},
            "/weight_info": {"weight_version": "default"},
            "/collective_rpc": {"results": [DESCRIPTION]},
            "/tokenize": lambda body: {"tokens": [ord(letter) for letter in body["prompt"]]},
            "/inference/v1/generate": generate,
        }
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_) -> None:
        """Write nothing: a client that hangs up is what some tests are about."""


@contextlib.contextmanager
def fake_vllm(generate: object = None, **routes: object) -> Iterator[FakeVllm]:
    server = FakeVllm()
    server.routes |= {"/" + name: answer for name, answer in routes.items()}
    if generate is not None:
        server.routes["/inference/v1/generate"] = generate
    try:
        yield server
    finally:
        server.ending.set()
        server.shutdown()
        server.server_close()


def unused_port(count: int = 1) -> int:
    """Return the first of ``count`` free ports, below those that the kernel gives to outgoing connections."""
    for _ in range(100):
        first = random.randrange(20_000, 32_000)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise OSError("100 times in a row, a port between 20000 and 32000 was taken")

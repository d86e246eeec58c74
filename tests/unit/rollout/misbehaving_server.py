"""A fake vLLM server for tests, each route of which a test can make go wrong.

It has the routes that server_replica.py uses, and answers from memory.
"""

import contextlib
import dataclasses
import http.server
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator

DESCRIPTION = {"vocab_size": 64, "max_model_tokens": 32, "logprobs_mode": "processed_logprobs", "dtype": "float32"}


def generate(body: dict) -> dict:
    """Return a well-behaved answer: ``n`` samples of three tokens, the last one a stop token."""
    content = [{"token_id": token, "logprob": -0.25 * token} for token in (1, 2, 9)]
    choice = {"token_ids": [1, 2, 9], "logprobs": {"content": content}, "finish_reason": "stop"}
    choice["weight_versions"] = [{"version": "3", "start": 0, "end": 3}]
    return {"choices": [{**choice, "index": index} for index in range(body["sampling_params"]["n"])]}


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers by the route's entry: a value is sent as JSON, a function gives one for a body, a fault acts."""

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

    do_GET = do_POST = _serve

    def answer(self, status: int, content: object) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.begin(len(data), status)
        self.wfile.write(data)

    def begin(self, length: int | None, status: int = 200) -> None:
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def drip(self, data: bytes) -> None:
        """Send the bytes now and then: a client with a time-out between bytes alone would wait for ever."""
        with contextlib.suppress(OSError):
            while not self.server.ending.wait(0.05):
                self.wfile.write(data)

    def cut(self, data: bytes) -> None:
        """Send the bytes, and end the connection."""
        self.wfile.write(data)
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_) -> None:
        """Write nothing: pytest's output is for the tests."""


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int
    content: object


@dataclasses.dataclass(frozen=True)
class Fault:
    """An act of the server in place of its usual answer."""

    act: Callable[[Handler], None]


def in_turn(*answers: Answer) -> Fault:
    """Return a fault that gives one answer after the other, and the last one from then on."""
    left = list(answers)

    def act(handler: Handler) -> None:
        found = left.pop(0) if len(left) > 1 else left[0]
        handler.answer(found.status, found.content)

    return Fault(act)


def _drip(handler: Handler) -> None:
    handler.begin(10_000)
    handler.drip(b" ")


def _drip_headers(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    handler.drip(b"X-A: b\r\n")


def _drop(handler: Handler) -> None:
    handler.begin(1000)
    handler.cut(b'{"choices": [')


def _reset(handler: Handler) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    handler.connection.close()


def _half_without_length(handler: Handler) -> None:
    handler.begin(None)  # so that the cut answer looks whole
    handler.wfile.write(b'{"choices": [{"index"')


def _garble(handler: Handler) -> None:
    with contextlib.suppress(OSError):
        handler.wfile.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")


FAULTS = {
    "hang": Fault(lambda handler: handler.server.ending.wait()),
    "drip": Fault(_drip),
    "drip headers": Fault(_drip_headers),
    "drop": Fault(_drop),
    "reset": Fault(_reset),
    "half without length": Fault(_half_without_length),
    "garble": Fault(_garble),
    "cut in the headers": Fault(lambda handler: handler.cut(b"HTTP/1.1 200 OK\r\nServer: uvi")),
}


class FakeVllm(http.server.ThreadingHTTPServer):
    """A vLLM server in threads of this process, without a model.

    ``routes`` may be changed at any time; ``seen`` holds (method, path, body, headers) of every request.
    """

    daemon_threads = True

    def __init__(self, **routes: object) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
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
            **{f"/{name}": answer for name, answer in routes.items()},
        }
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, *_) -> None:
        """Write nothing: a client that hangs up is what some tests are about."""


@contextlib.contextmanager
def fake_vllm(generate: object = None, **routes: object) -> Iterator[FakeVllm]:
    server = FakeVllm(**routes)
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

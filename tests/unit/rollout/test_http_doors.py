"""Who may speak to a run's HTTP servers, how much of a request is held, and how many connections there are."""

import contextlib
import http.client
import logging
import socket
import threading
from collections.abc import Iterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from megatron_rl.rollout import http_connections, http_doors
from megatron_rl.rollout.http_connections import OncePerMinute
from megatron_rl.rollout.http_doors import SMALL, Bounds, Doors
from megatron_rl.rollout.http_server import listening
from tests.patience import patient, until

KEY, MOST = "k" * 8, 4 * SMALL


async def length(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


BEGUN = threading.Event()


@contextlib.contextmanager
def opened(keys: tuple[str, ...] = (KEY, KEY * 2, KEY * 3), most_held: int = 3 * MOST) -> Iterator[tuple[str, int]]:
    """Serve the length of a body within the block; yield the address."""
    bounds = Bounds(
        host="127.0.0.1", keys=keys, key_of=lambda headers: headers.get("x-api-key", ""), key_words="X-API-Key",
        most_bytes=MOST, setting="most_mb", most_held=most_held,
        refusal=lambda status, words: PlainTextResponse(words, status_code=status),
    )
    doors = Doors(Starlette(routes=[Route("/", length, methods=["POST"])]), bounds)

    async def app(scope, receive, send) -> None:
        BEGUN.set()
        await doors(scope, receive, send)

    with listening(app, "127.0.0.1", 0, section="test") as address:
        yield "127.0.0.1", int(address.rpartition(":")[2])


def head(size: int, **headers: str) -> bytes:
    given = {"host": "127.0.0.1", "key": KEY, "content-length": str(size)} | headers
    lines = [f"{name.replace('key', 'x-api-key')}: {value}" for name, value in given.items()]
    return "\r\n".join(["POST / HTTP/1.1", *lines, "\r\n"]).encode()


def connected(address: tuple[str, int], sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(address, timeout=patient(20.0))
    connection.sendall(sent)
    return connection


def answered(connection: socket.socket) -> tuple[int, str]:
    """Return the status and the body of an answer; (0, "") where the server has closed the connection."""
    answer = http.client.HTTPResponse(connection)
    try:
        answer.begin()
        return answer.status, answer.read().decode()
    except (ConnectionError, http.client.BadStatusLine):
        return 0, ""


def test_a_request_that_is_not_let_in_has_no_body_read() -> None:
    with opened() as address:
        for headers, status, words in (
            ({"key": "other"}, 401, "X-API-Key holds no key"),
            ({"host": "evil.example:80"}, 403, "Host 'evil.example:80' is no name of this server"),
            ({"origin": "https://evil.example"}, 403, "pages of other origins"),
        ):
            connection = connected(address, head(MOST, **headers))  # and not one byte of the body
            found, text = answered(connection)
            assert (found, words in text) == (status, True), text
            assert connection.recv(1) == b""  # and the connection is over
        for own in ("127.0.0.1:8000", "localhost", "[::1]:1"):
            assert answered(connected(address, head(3, host=own) + b"abc")) == (200, "3")
        own = {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}
        assert answered(connected(address, head(3, **own) + b"abc")) == (200, "3")


def test_a_body_is_bounded_alone_and_all_of_them_together() -> None:
    with opened() as address:
        assert answered(connected(address, head(MOST) + b"x" * MOST)) == (200, str(MOST))
        status, text = answered(connected(address, head(MOST + 1) + b"x" * (MOST + 1)))
        assert status == 413 and "most_mb allows 262,144" in text
        unfinished = [connected(address, head(MOST, key=key) + b"x" * (MOST - 1)) for key in (KEY, KEY * 2)]

        def full(key: str = KEY) -> bool:
            status, text = answered(connected(address, head(MOST, key=key) + b"x" * MOST))
            assert status in (200, 429), text
            return status == 429

        assert until(full, 20.0) and not full(KEY * 3)  # half of it is for others
        assert answered(connected(address, head(3) + b"abc")) == (200, "3")  # a small one always passes
        unfinished[0].close()  # its client is gone, and what it held is free again
        assert until(lambda: not full(), 20.0)


def test_headers_and_bodies_have_a_deadline(monkeypatch) -> None:
    monkeypatch.setattr(http_connections, "HEADERS_S", 0.3)
    monkeypatch.setattr(http_doors, "GRACE_S", 0.3)
    with opened() as address:
        silent, trickling = connected(address), connected(address, b"POST / HTTP/1.1\r\nHo")
        assert answered(silent) == answered(trickling) == (0, "")
        status, text = answered(connected(address, head(3) + b"a"))
        assert status == 408 and "1 bytes of the body came" in text

        def second_is_cut() -> bool:  # a host under load may cut the first one too
            again = connected(address, head(3) + b"abc")
            if answered(again) != (200, "3"):
                return False
            again.sendall(b"POST / HT")  # the second request's headers, on a connection that is kept
            return answered(again) == (0, "")

        assert until(second_is_cut, 20.0)


def test_the_oldest_idle_connection_makes_room(monkeypatch) -> None:
    monkeypatch.setattr(http_connections, "most_connections", lambda: 8)
    with opened() as address:
        BEGUN.clear()
        busy = connected(address, head(3))
        assert BEGUN.wait(patient(20.0))  # a request is under way here
        idle = [connected(address) for _ in range(20)]
        assert answered(connected(address, head(3) + b"abc")) == (200, "3")
        idle[-1].sendall(head(3) + b"abc")
        assert answered(idle[-1]) == (200, "3") and answered(idle[0]) == (0, "")
        busy.sendall(b"abc")
        assert answered(busy) == (200, "3")


def test_connections_wait_while_the_server_is_busy() -> None:
    """Four times as many as are accepted at once are connected by a server that accepts none, and all are answered."""
    begun, free = threading.Event(), threading.Event()

    async def app(scope, receive, send) -> None:
        begun.set()
        free.wait(patient(60.0))  # the event loop stands still, as that of a process without a core does
        await PlainTextResponse("here")(scope, receive, send)

    request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    with listening(app, "127.0.0.1", 0, section="test") as address, contextlib.ExitStack() as ends:
        ends.callback(free.set)
        place = "127.0.0.1", int(address.rpartition(":")[2])
        first = connected(place, request)
        assert begun.wait(patient(20.0))
        waiting = [connected(place, request) for _ in range(4 * http_connections.BACKLOG)]
        free.set()
        assert all(answered(connection) == (200, "here") for connection in (first, *waiting))


def test_a_kind_of_line_is_logged_once_a_minute_and_the_rest_is_counted() -> None:
    now = [0.0]
    quiet = OncePerMinute(clock=lambda: now[0])

    def passes(text: str, level: int = logging.WARNING) -> str | None:
        record = logging.LogRecord("x", level, "", 0, text, None, None)
        return record.getMessage() if quiet.filter(record) else None

    assert [passes(x) for x in ("a", "a", "a\nb", "c")] == ["a", None, None, "c"]
    assert passes("a", logging.ERROR) == "a"
    now[0] = 61.0
    assert [passes("a"), passes("a")] == ["a (2 more since the last such line)", None]

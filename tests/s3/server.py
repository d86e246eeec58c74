"""An S3 server that nobody here wrote (moto), in a process of its own, and a door before it that can be shut or cut."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

PROGRAM = """
import sys
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
BUCKET = "bucket"


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    """Start a server with one bucket and yield its port."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        port = int(process.stdout.readline())
        import botocore.session

        client = botocore.session.get_session().create_client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            region_name="us-east-1",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
        )
        client.create_bucket(Bucket=BUCKET)
        yield port
    finally:
        process.stdin.close()
        process.terminate()
        process.wait(30)


class Door:
    """Passes connections on to a server until it is told to do otherwise.

    hold: bytes of a request that is passed on no further, as soon as they are seen; ``held`` is set then. cut: bytes of
    a request at which every connection is closed, and no new one taken until it is None again. busy: requests that are
    answered with 503 before the server sees them, by these bytes; each takes one off ``times``.
    """

    def __init__(self, port: int) -> None:
        self.target, self.times = port, 0
        self.hold: bytes | None = None
        self.cut: bytes | None = None
        self.busy: bytes | None = None
        self.held, self.is_cut = threading.Event(), False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def open(self) -> None:
        """Pass everything on again; connections that were held or cut stay so."""
        self.hold = self.cut = self.busy = None
        self.held.clear()
        self.is_cut = False

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self.listener.accept()[0]
                if self.is_cut:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self.target))
                self._open += [client, server]
                threading.Thread(target=self._ask, args=(client, server), daemon=True).start()
                threading.Thread(target=self._answer, args=(server, client), daemon=True).start()

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while block := client.recv(1 << 16):
                if self.hold is not None and self.hold in block:
                    self.held.set()
                    return  # the client waits for an answer
                if self.cut is not None and self.cut in block:
                    self.is_cut = True
                    for each in list(self._open):
                        _shut(each)
                    return
                if self.busy is not None and self.busy in block and self.times > 0:
                    self.times -= 1
                    client.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                    break
                server.sendall(block)
        _shut(client)
        _shut(server)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while block := server.recv(1 << 16):
                client.sendall(block)
        _shut(client)

    def close(self) -> None:
        self.listener.close()
        for each in self._open:
            each.close()


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def environment(port: int) -> dict[str, str]:
    """Return the variables by which s3fs finds the server."""
    return {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}

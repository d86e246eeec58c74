"""The wait of a job's pods for one another, so that torchrun starts on all of them together.

torchrun's ranks find one another through its store, a server on pod 0. A pod that Kubernetes has
replaced could join the store of the previous attempt, which the other pods may not have left yet. So
every pod first connects to pod 0 and sends its number. Once all pods are connected, pod 0 answers and
closes the port. So no pod can join an attempt that already runs.

Invariants (tests/unit/test_pod.py):

1. No pod starts before the pods 0 … N - 1 are connected at the same time.
2. A pod that leaves while it waits is forgotten; a second pod of the same number replaces it.
3. Every wait ends after at most ``meet_s`` seconds, or within a second once this pod is told to leave.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import socket
import time
from collections.abc import Callable

from megatron_rl.commands.pod.place import Place
from megatron_rl.errors import RunError

TICK_S, CONNECT_S, SAY_S = 0.5, 5.0, 60.0
START = b"start\n"
MOST_BYTES = 64  # the longest line of a pod; a longer one is from no pod of this job
MOST_STRANGERS = 256  # connections that have not yet sent a number


class Left(Exception):
    """Reports that this pod was told to leave before all pods of the job were connected."""


def meet(place: Place, asked: Callable[[], bool], say: Callable[[str], None]) -> str:
    """Wait for all pods of the job; return pod 0's address, to which torchrun's ranks connect, or "" for a single pod.

    asked: a function that returns whether this pod has been told to leave.
    say: a function that prints a line.

    Raises RunError if ``place.meet_s`` seconds pass; the message names the missing pods, or the
    reason why pod 0 was not reached. Raises Left if this pod is told to leave.
    """
    deadline = time.monotonic() + place.meet_s
    if asked():
        raise Left
    if place.num_nodes == 1:
        return ""
    if place.node > 0:
        return _join(place, deadline, asked, say)
    _wait_as_head(place, deadline, asked, say)
    return place.address or _resolved(place, deadline, asked)


def _wait_as_head(place: Place, deadline: float, asked: Callable[[], bool], say: Callable[[str], None]) -> None:
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            socket.create_server(
                ("", place.meeting_port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=1024
            )
        )
        server.setblocking(False)
        register = Register(server, place.num_nodes)
        stack.callback(register.close)
        said = time.monotonic()
        while (missing := register.missing()) or not register.all_stay():
            if time.monotonic() >= deadline:
                raise RunError(
                    f"pod 0 waited {place.meet_s} s (MEET_S) for pods {_named(missing)} of {place.num_nodes}; look for "
                    "them with kubectl get pods and kubectl describe pod: a pod that is Pending finds no node, and a "
                    f"network policy must let the job's pods reach port {place.meeting_port}"
                )
            if asked():
                raise Left
            if time.monotonic() - said >= SAY_S:
                said = time.monotonic()
                say(f"pod 0 waits for pods {_named(missing)} of {place.num_nodes}")
            register.look(TICK_S)
        register.start()


class Register:
    """Keeps, on pod 0, one connection to each waiting pod.

    server: a listening socket in non-blocking mode.
    num_nodes: the number of pods of the job, pod 0 included.
    """

    def __init__(self, server: socket.socket, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self._server = server
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._lines: dict[socket.socket, bytes] = {}  # the bytes of each connection until its number is known
        self._pods: dict[int, socket.socket] = {}

    def missing(self) -> list[int]:
        """Return the numbers of the pods that are not connected, without pod 0."""
        return [node for node in range(1, self.num_nodes) if node not in self._pods]

    def look(self, wait_s: float) -> None:
        """Handle, for up to ``wait_s`` seconds, what the pods send.

        New connections are accepted, the pods' numbers are read, and closed connections are
        dropped.
        """
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._server:
                self._accept()
            else:
                self._read(key.fileobj)

    def all_stay(self) -> bool:
        """Drop the connection of each pod that has left; return whether all pods are still connected."""
        for connection in list(self._pods.values()):
            with contextlib.suppress(BlockingIOError):  # nothing has come: the pod waits
                try:
                    if connection.recv(1, socket.MSG_PEEK):
                        continue
                except ConnectionError:
                    pass
                self._forget(connection)
        return not self.missing()

    def start(self) -> None:
        """Tell every waiting pod to start torchrun, since all pods are connected."""
        for connection in self._pods.values():
            with contextlib.suppress(OSError):  # it has just left; torchrun misses its ranks within a bounded time
                connection.sendall(START)

    def close(self) -> None:
        """Close every accepted connection and the selector; the listening socket stays open."""
        for connection in [*self._lines, *self._pods.values()]:
            connection.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:  # it has gone already
            return
        if len(self._lines) >= MOST_STRANGERS:
            connection.close()
            return
        connection.setblocking(False)
        _notice_a_lost_host(connection)
        self._selector.register(connection, selectors.EVENT_READ)
        self._lines[connection] = b""

    def _read(self, connection: socket.socket) -> None:
        try:
            arrived = connection.recv(MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            arrived = b""
        line = self._lines.get(connection)
        if not arrived or line is None:  # it left, or a pod that had sent its number went on sending
            self._forget(connection)
            return
        line += arrived
        if b"\n" not in line and len(line) < MOST_BYTES:
            self._lines[connection] = line
            return
        match = re.fullmatch(rb"pod ([0-9]{1,6}) of ([0-9]{1,6})\n", line)
        node = int(match[1]) if match else 0
        if not match or int(match[2]) != self.num_nodes or not 1 <= node < self.num_nodes:
            self._forget(connection)
            return
        del self._lines[connection]
        if node in self._pods:  # the pod that this one replaces
            self._forget(self._pods[node])
        self._pods[node] = connection

    def _forget(self, connection: socket.socket) -> None:
        self._lines.pop(connection, None)
        self._pods = {node: other for node, other in self._pods.items() if other is not connection}
        self._selector.unregister(connection)
        connection.close()


def _join(place: Place, deadline: float, asked: Callable[[], bool], say: Callable[[str], None]) -> str:
    told = None
    while True:
        try:
            with socket.create_connection((place.head, place.meeting_port), timeout=CONNECT_S) as line:
                _notice_a_lost_host(line)
                line.sendall(f"pod {place.node} of {place.num_nodes}\n".encode())
                if _is_started(line, deadline, asked):
                    return line.getpeername()[0]
                reason = "it closed the connection"
        except OSError as error:
            reason = str(error)
        if asked():
            raise Left
        if time.monotonic() >= deadline:
            raise RunError(
                f"pod {place.node} of {place.num_nodes} did not meet pod 0 at {place.head}:{place.meeting_port} within "
                f"{place.meet_s} s (MEET_S): {reason}; is pod 0 running, does a headless service with "
                "publishNotReadyAddresses name it, and does a network policy let the job's pods reach one another?"
            )
        if told is None or time.monotonic() - told >= SAY_S:
            told = time.monotonic()
            say(f"pod {place.node} of {place.num_nodes} waits for pod 0 at {place.head}:{place.meeting_port}: {reason}")
        time.sleep(TICK_S)


def _is_started(line: socket.socket, deadline: float, asked: Callable[[], bool]) -> bool:
    """Wait for pod 0's start message on the connection ``line``; return whether it came.

    asked: a function that returns whether this pod has been told to leave.

    Returns False at the deadline, if this pod is told to leave, or if pod 0 closes the connection
    or sends anything else.
    """
    line.settimeout(TICK_S)
    heard = b""
    while not asked() and time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            arrived = line.recv(MOST_BYTES)
            heard += arrived
            if heard == START:
                return True
            if not arrived or not START.startswith(heard):
                return False
    return False


def _resolved(place: Place, deadline: float, asked: Callable[[], bool]) -> str:
    """Return the IP address of pod 0's host name; look it up again until DNS knows it.

    asked: a function that returns whether this pod has been told to leave.

    Raises RunError at the deadline, and Left if this pod is told to leave.
    """
    while True:
        try:
            return socket.getaddrinfo(place.head, place.port, type=socket.SOCK_STREAM)[0][4][0]
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RunError(
                    f"pod 0 found no address of its own name {place.head} within {place.meet_s} s (MEET_S): {error}; "
                    "set POD_IP from status.podIP, or HEAD to <job>-0.<headless service>"
                ) from error
        if asked():
            raise Left
        time.sleep(TICK_S)


def _notice_a_lost_host(connection: socket.socket) -> None:
    """Set TCP keepalive, so that the kernel ends the connection about 25 s after the other host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _named(nodes: list[int]) -> str:
    shown = ", ".join(map(str, nodes[:10]))
    return f"{shown} and {len(nodes) - 10} more" if len(nodes) > 10 else shown

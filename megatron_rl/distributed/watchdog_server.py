"""Rank 0's side of the watchdog: it hears every rank, finds the first cause of a failure and tells all ranks.

distributed/watchdog.py has the rules. A message is one line with a JSON object. From a rank to the
server: hello, stage, raised, overdue (a user's function takes too long), lost (a collective failed
on this rank), answer, bye. From the server to a rank: welcome (all ranks have joined), server (rank
0's stage, in case rank 0 dies), where (asks for the main thread's position), cause, bye.

Other programs may reach the port until every rank has joined; then the port is closed. A connection
belongs to a rank once it has said hello with the run's token. Until then it may send HELLO_BYTES
bytes within HELLO_S seconds, and the number of such connections is limited. Any other message
closes the connection.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import select
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Mapping

import psutil

from megatron_rl.distributed.rank_state import ANSWER_S, BETWEEN, SETTLE_S, Cause, RankState, SlowStages
from megatron_rl.errors import PeerError

HELLO_BYTES, HELLO_S = 4096, 10.0  # limits of a connection that has not said hello
MESSAGE_BYTES = 1 << 20  # limit of a rank's line; the longest line that a rank sends has about 20 kB
STRANGERS = 16  # connections without a hello, beyond one for each rank that has not joined
PAUSE_S = 0.5  # pause after a connection could not be accepted, for example without free descriptors

# Forked children close these sockets: they would keep a connection open after their parent's death.
_OPEN: weakref.WeakSet[socket.socket] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [connection.close() for connection in list(_OPEN)])


class JsonConnection:
    """Sends and receives JSON objects, one per line, over a socket; several threads may send."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.most_bytes = MESSAGE_BYTES
        self._buffer = b""
        self._lock = threading.Lock()
        _OPEN.add(connection)
        connection.settimeout(ANSWER_S)  # bounds a send to a stopped process, which reads nothing
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, vars(socket)[name], value)

    def send(self, **message: object) -> None:
        """Send one message. A broken connection raises nothing here; ``receive`` reports it."""
        with contextlib.suppress(OSError), self._lock:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, wait_s: float = 0.0) -> list[dict] | None:
        """Return the messages that arrive within ``wait_s`` seconds; [] if no whole line arrives.

        Returns None if the other side is gone or sends a line that is no message. Returns None also
        after more than ``most_bytes`` (an attribute) bytes without the end of a line.
        """
        ready = select.poll()  # not select.select, which refuses a descriptor above 1023
        try:
            ready.register(self.socket, select.POLLIN)
            if not ready.poll(1000 * wait_s):
                return []
            arrived = self.socket.recv(65536)
        except TimeoutError:
            return []
        except (OSError, ValueError):  # ValueError: the socket was closed on this side
            return None
        if not arrived:
            return None
        *lines, self._buffer = (self._buffer + arrived).split(b"\n")
        if len(self._buffer) > self.most_bytes:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # another program at the port
            return None
        are_whole = all(isinstance(message, dict) and isinstance(message.get("is"), str) for message in messages)
        return messages if are_whole else None


def find_culprit(peers: Mapping[int, RankState]) -> Cause:
    """Return the cause of a failed collective if no rank raised or died: the rank that kept the others waiting.

    The rank is one whose watch thread does not answer. If all answer, it is one that is busy
    outside any collective. If none is busy, it is one that has entered fewer stages of the run,
    such as "update", than another rank. Otherwise the cause names no rank.

    peers: rank → what the server knows of it.
    """
    error_note = "".join([f" ({peer.who} met {peer.lost})" for peer in peers.values() if peer.lost][:1])
    running = [peer for _, peer in sorted(peers.items()) if peer.lost is None and not peer.ended]
    last_stage = max((peer.number for peer in peers.values()), default=0)
    silent = [peer for peer in running if peer.answer is None]
    busy = [peer for peer in running if peer.answer and not peer.answer["waits"] and not peer.answer["left"]]
    behind = [peer for peer in running if peer.number < last_stage]
    guilty = min(silent or busy or behind, key=lambda peer: peer.number, default=None)
    if guilty is None:
        places = "; ".join(f"rank {rank} {peer.place()}" for rank, peer in sorted(peers.items()))
        text = f"a collective failed and no rank is known to be the cause: {places}{error_note}"
        return Cause(rank=None, text=text if len(text) < 20_000 else f"{text[:20_000]} […]")
    if silent:
        fault = "does not answer (its process is stopped, or its host cannot be reached)"
    else:
        fault = "keeps the others waiting" if busy else f"is {last_stage - guilty.number} stages behind"
    others = [peer.rank for peer in silent or busy or behind if peer is not guilty]
    others_note = f"; so do ranks {others}" if others else ""
    return Cause(rank=guilty.rank, text=f"{guilty.who} {fault}: it has been {guilty.place()}{others_note}{error_note}")


class WatchdogServer:
    """Hears every rank, finds the first cause of a failure and tells it to all ranks.

    All methods but ``close`` run in the server's own thread.

    listener: the socket at which ranks connect.
    token: the run's secret, which a rank must send.
    world_size: the number of the run's ranks.
    slow_stages: reports stages that take long.
    """

    def __init__(self, listener: socket.socket, token: str, world_size: int, slow_stages: SlowStages):
        self.world_size = world_size
        self._slow_stages = slow_stages
        self.peers: dict[int, RankState] = {}
        self.cause: Cause | None = None
        self._token = token
        self._lines: dict[int, JsonConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = listener  # None once every rank has joined
        listener.setblocking(False)
        self._accept_at = 0.0  # after a failed accept: monotonic seconds at which accepting goes on
        self._strangers: dict[JsonConnection, float] = {}  # connections that have not said hello, and their arrival
        self._selector.register(listener, selectors.EVENT_READ)
        self._failed_at: float | None = None
        self._asked_at: float | None = None
        self._told: tuple[float, str] = (0.0, BETWEEN)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch server", daemon=True)
        self._thread.start()

    def close(self, *, failed: bool) -> None:
        """End the server's thread; after a failure, first wait until its cause is found, at most ANSWER_S seconds."""
        deadline = time.monotonic() + ANSWER_S
        while failed and self.cause is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self._closing.set()
        self._thread.join(ANSWER_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            for key, _ in self._selector.select(timeout=0.2):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj.fileno() != -1:  # −1: it was dropped just now
                    self._read(key)
            self._tick()
        self._tell(**{"is": "bye"})
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()
        if self._listener is not None:
            self._listener.close()

    def _accept(self) -> None:
        try:
            line = JsonConnection(self._listener.accept()[0])
        except OSError:  # no descriptor is left, or the other side has gone again: try later
            self._selector.unregister(self._listener)
            self._accept_at = time.monotonic() + PAUSE_S
            return
        line.most_bytes = HELLO_BYTES
        self._selector.register(line.socket, selectors.EVENT_READ, [line, None])
        self._strangers[line] = time.monotonic()
        if len(self._strangers) > self.world_size - len(self.peers) + STRANGERS:
            self._drop(next(iter(self._strangers)), None)

    def _admits(self, message: Mapping[str, object]) -> bool:
        """Return whether the message is the hello of a rank that has not joined, with the run's token."""
        token, rank, who = message.get("token"), message.get("rank"), message.get("who")
        return (
            message["is"] == "hello"
            and isinstance(token, str)
            and hmac.compare_digest(token.encode(errors="surrogatepass"), self._token.encode())
            and type(rank) is int
            and 0 <= rank < self.world_size
            and rank not in self.peers
            and isinstance(who, str)
        )

    def _admit(self, line: JsonConnection, rank: int, who: str) -> None:
        del self._strangers[line]
        line.most_bytes = MESSAGE_BYTES
        self._lines[rank] = line
        self.peers[rank] = RankState(rank=rank, who=who)
        if len(self.peers) < self.world_size:
            return
        # all ranks have joined: close the port, then welcome; no rank goes on before, so all hear later messages
        if not self._accept_at:
            self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = None
        for stranger in list(self._strangers):
            self._drop(stranger, None)
        self._tell(**{"is": "welcome"})

    def _read(self, key: selectors.SelectorKey) -> None:
        line, rank = key.data
        messages = line.receive()
        if messages is None:
            self._drop(line, rank)
        for message in messages or []:
            if rank is not None:
                self._hear(self.peers[rank], message)
            elif self._admits(message):
                rank = key.data[1] = message["rank"]
                self._admit(line, rank, message["who"])
            else:
                self._drop(line, None)
                return

    def _drop(self, line: JsonConnection, rank: int | None) -> None:
        self._selector.unregister(line.socket)
        line.socket.close()
        self._strangers.pop(line, None)
        if rank is not None:
            del self._lines[rank]
            peer = self.peers[rank]
            if not peer.ended:
                peer.ended = True
                self._announce(peer.gone())

    def _hear(self, peer: RankState, message: dict) -> None:
        match message["is"]:
            case "stage":
                peer.stage, peer.number, peer.since = message["stage"], message["number"], time.monotonic()
            case "raised":
                self._announce(
                    Cause(rank=peer.rank, text=f"{peer.who} raised {message['error']}; it had been {peer.doing()}")
                )
            case "overdue":
                self._announce(Cause(rank=peer.rank, text=message["text"]))
            case "lost":
                peer.lost = message["error"]
                self._failed_at = self._failed_at or time.monotonic()
            case "answer":
                peer.answer = message
            case "bye":
                peer.ended = True

    def _tick(self) -> None:
        now = time.monotonic()
        for line in [line for line, came in self._strangers.items() if now - came > HELLO_S]:
            self._drop(line, None)
        if self._listener is not None and self._accept_at and now >= self._accept_at:
            self._accept_at = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
        if self.cause is None and len(self.peers) == self.world_size:
            self._slow_stages.look(self.peers.values(), now)
        if 0 in self.peers and now - self._told[0] > 1.0 and self.peers[0].stage != self._told[1]:
            self._told = (now, self.peers[0].stage)
            self._tell(**{"is": "server", "stage": self.peers[0].stage})
        if self.cause is not None or self._failed_at is None or now - self._failed_at < SETTLE_S:
            return
        if self._asked_at is None:
            self._asked_at = now
            self._tell(**{"is": "where"})
        elif now - self._asked_at > ANSWER_S or all(peer.answer or peer.ended for peer in self.peers.values()):
            self._announce(find_culprit(self.peers))

    def _announce(self, cause: Cause) -> None:
        if self.cause is None:
            self.cause = cause
            self._tell(**{"is": "cause", "rank": cause.rank, "text": cause.text})

    def _tell(self, **message: object) -> None:
        for line in list(self._lines.values()):
            line.send(**message)


def own_address() -> str:
    """Return this host's address on the network that the ranks use; 127.0.0.1 if it has no other.

    The result is the address of an interface whose name begins as GLOO_SOCKET_IFNAME or
    NCCL_SOCKET_IFNAME says. Without one it is the address from which this host reaches MASTER_ADDR,
    else the address of the host's name.
    """
    names = [
        name.lstrip("=")
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        for name in os.environ.get(variable, "").split(",")
        if name and not name.startswith("^")  # in NCCL's variable "^" excludes interfaces
    ]
    addresses = [
        entry.address
        for name in names
        for interface, entries in psutil.net_if_addrs().items()
        if interface.startswith(name)
        for entry in entries
        if entry.family == socket.AF_INET
    ]
    if addresses:
        return addresses[0]
    for host in [os.environ.get("MASTER_ADDR", ""), socket.gethostname()]:
        with contextlib.suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(host or None, 9, type=socket.SOCK_DGRAM):
                with socket.socket(family, kind) as probe:
                    probe.connect(address)  # a datagram socket's connect finds the route and sends nothing
                    addresses.append(probe.getsockname()[0])
    return next((address for address in addresses if not address.startswith("127.") and address != "::1"), "127.0.0.1")


def listen(address: str, backlog: int) -> socket.socket:
    """Return a socket that listens at a free port of one address, so that other networks cannot reach it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=backlog)


def connect(address: str, port: int, who: str, deadline_s: float) -> JsonConnection:
    """Return this rank's connection to rank 0's server; raise PeerError if the server cannot be reached.

    who: this rank's name for the message.
    """
    try:
        return JsonConnection(socket.create_connection((address, port), timeout=min(deadline_s, 10.0)))
    except OSError as error:
        raise PeerError(
            f"{who} cannot reach the watch of rank 0 at {address}:{port} ({error}); the hosts must reach one another's "
            "ports, and GLOO_SOCKET_IFNAME names the network's interface where there are several"
        ) from error

"""Who stopped, and where: every rank says what stage it is in, and a failure anywhere ends the run everywhere with a
named cause.

Rank 0 keeps the watch: a thread with one connection to every rank's watch thread. It is not torch's TCPStore, since a
closed connection tells of a killed process at once and without a heartbeat that a busy interpreter would miss (a host
that is gone is told by TCP keepalive, about 25 s), and since a broken store prints C++ stacks before the named error.

1. A rank that raises tells its error and its stage before its process groups close.
2. A rank whose connection closes without a word was killed. Where that is rank 0, every rank sees it for itself.
3. A rank whose collective fails or runs into ``run.deadline_s`` (gloo's, pipeline p2p's, NCCL's) asks. If nobody raised
   or died within SETTLE_S, every rank is asked where its main thread stands: guilty is who is not waiting for others,
   else who is behind.
4. The first cause is told to all, once. A rank whose main thread has not ended END_S after that (it waits in a
   collective that nothing will end, or sleeps) is ended by its watch thread with ``os._exit``: Python cannot interrupt
   a thread that is in C.

What came before ``open_watchdog`` (the groups, loading weights) is not watched. Not run: NCCL, and more than one host.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import secrets
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron_rl.distributed.collectives import gather_json
from megatron_rl.distributed.topology import Topology
from megatron_rl.distributed.watchdog_server import (
    ANSWER_S,
    BETWEEN,
    SETTLE_S,
    Cause,
    JsonConnection,
    RankState,
    WatchdogServer,
)
from megatron_rl.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    LockstepError,
    NonFiniteGradient,
    PeerError,
    RewardError,
)

ASK_S = SETTLE_S + ANSWER_S + 5.0  # the main thread waits this long for the cause
END_S = 5.0  # after the cause, the main thread has this long to end by itself
TORCH = os.path.dirname(torch.__file__) + os.sep
TORCH_DISTRIBUTED = os.path.join(TORCH, "distributed") + os.sep
WAITING_CALLS = (".wait(", "synchronize(", ".item()", ".tolist()", ".cpu()")  # the last four wait for kernels, on CUDA
KNOWN_EVERYWHERE = (
    CheckpointError,
    ConfigError,
    EngineError,
    LockstepError,
    NonFiniteGradient,
    RewardError,
)  # they name the cause already


def is_peer_failure(error: BaseException) -> bool:
    """True for what a collective raises when another rank does not take part. gloo's are plain RuntimeErrors."""
    return isinstance(error, dist.DistError | PeerError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def where_is(thread: int) -> tuple[str, bool]:
    """Where a thread of this process stands, as "file:line function" outside torch, and whether it waits for other
    ranks there."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its end", False
    file = frame.f_code.co_filename
    line = linecache.getline(file, frame.f_lineno)
    waits = file.startswith(TORCH_DISTRIBUTED) or any(call in line for call in WAITING_CALLS)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}", waits


class Watchdog:
    """This rank's side. ``stage`` says what the main thread does; a Watch without a line (a world of one) only notes
    it."""

    def __init__(self, rank: int, who: str, keeper_who: str):
        self.rank, self.who = rank, who
        self._keeper = RankState(rank=0, who=keeper_who)
        self._stage, self._number, self._since = BETWEEN, 0, time.monotonic()
        self._main = threading.get_ident()
        self._line: JsonConnection | None = None
        self._cause: Cause | None = None
        self._welcome = threading.Event()
        self._known = threading.Event()
        self._left = threading.Event()

    def connect(self, connection: socket.socket, token: str, deadline_s: float) -> None:
        """Returns when every rank has connected."""
        self._line = JsonConnection(connection)
        self._line.send(**{"is": "hello", "rank": self.rank, "who": self.who, "token": token})
        threading.Thread(target=self._run, name="watch", daemon=True).start()
        if not self._welcome.wait(deadline_s):
            raise PeerError(f"{self.who} waited {deadline_s:g} s for every rank to join the watch of rank 0")

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Within it the main thread is in ``name``; an error leaves it there, so that its report says where it was."""
        outer = self._stage
        self._enter(name)
        yield
        self._enter(outer)

    def _enter(self, name: str) -> None:
        self._number += self._stage == BETWEEN  # nested ones do not count: not every rank enters them
        self._stage, self._since = name, time.monotonic()
        if self._line is not None:
            self._line.send(**{"is": "stage", "stage": name, "number": self._number})

    def failed(self, error: BaseException) -> None:
        """Tells the others what this rank met; raises PeerError, with it as the cause, where it is another rank's
        doing."""
        self._left.set()
        if self._line is None:
            return
        others = self._cause is not None and self._cause.rank != self.rank and isinstance(error, Exception)
        if not isinstance(error, KNOWN_EVERYWHERE) and (others or is_peer_failure(error)):
            said = f"{type(error).__name__}: {error}"[:500]
            self._line.send(**{"is": "lost", "error": said})
            if self._known.wait(ASK_S):
                raise PeerError(self._cause.text) from error
            keeper = f"{self._keeper.who}, which keeps the watch, did not say why in {ASK_S:g} s"
            raise PeerError(f"a collective failed on {self.who}, in {self._stage!r}, and {keeper}: {said}") from error
        error.add_note(
            f"{self.who} raised it; it had been in {self._stage!r} for {time.monotonic() - self._since:.1f} s"
        )
        self._line.send(**{"is": "raised", "error": f"{type(error).__name__}: {error}"[:2000]})

    def leave(self) -> None:
        """Ends the watching of this rank: what happens after it is nobody's concern."""
        self._left.set()
        if self._line is not None:
            self._line.send(**{"is": "bye"})

    def _run(self) -> None:
        end_at = None
        while end_at is None or time.monotonic() < end_at:
            messages = self._line.receive() if self._cause is None else []
            if self._cause is not None and self._left.wait(0.1):
                return
            if messages is None:
                self._learn(self._keeper.gone())
            for message in messages or []:
                if (
                    message["is"] == "bye" and self._cause is None
                ):  # rank 0 is done; after a cause this rank must still end
                    return
                self._hear(message)
            if self._cause is not None and end_at is None:
                end_at = time.monotonic() + END_S
        self._end()

    def _hear(self, message: dict) -> None:
        match message["is"]:
            case "welcome":
                self._welcome.set()
            case "keeper":
                self._keeper.stage, self._keeper.since = message["stage"], time.monotonic()
            case "where":
                at, waits = where_is(self._main)
                self._line.send(**{"is": "answer", "at": at, "waits": waits, "left": self._left.is_set()})
            case "cause":
                self._learn(Cause(rank=message["rank"], text=message["text"]))

    def _learn(self, cause: Cause) -> None:
        self._cause = cause
        self._known.set()

    def _end(self) -> None:
        at, _ = where_is(self._main)
        print(
            f"megatron_rl: {self._cause.text}\n{self.who} had not ended {END_S:g} s later, at {at}, and is ended here",
            file=sys.__stderr__,
            flush=True,
        )
        os._exit(1)


def _addresses() -> list[str]:
    """This host's, as other hosts may reach it: the one by which the launcher made rank 0 known, then those of its
    name."""
    found = [os.environ["MASTER_ADDR"]] if "MASTER_ADDR" in os.environ else []
    with contextlib.suppress(OSError):
        found += [entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return list(dict.fromkeys(found))


def _connect(addresses: list[str], port: int, who: str, deadline_s: float) -> socket.socket:
    met = []
    for address in addresses:
        try:
            return socket.create_connection((address, port), timeout=min(deadline_s, 10.0))
        except OSError as error:
            met.append(f"{address}:{port} ({error})")
    raise PeerError(
        f"{who} cannot reach the watch of rank 0 at {', '.join(met)}; the hosts must reach one another's ports"
    )


@contextlib.contextmanager
def open_watchdog(topology: Topology, deadline_s: float) -> Iterator[Watchdog]:
    """Watches what runs within it. A collective over the world.

    An error within ends every rank's: where it is another rank's doing it leaves here as a PeerError that names rank,
    place and stage.
    """
    who = topology.who(topology.rank)
    keeper: WatchdogServer | None = None
    listener, offer = None, None
    hosts = gather_json([who, f"{socket.gethostname()} {uuid.getnode()}"]) if topology.world_size > 1 else [[who, ""]]
    watch = Watchdog(topology.rank, who, hosts[0][0])
    if topology.world_size > 1:
        one_host = len({host for _, host in hosts}) == 1
        if topology.rank == 0:
            listener = socket.create_server(("127.0.0.1" if one_host else "", 0), backlog=topology.world_size)
            offer = [["127.0.0.1"] if one_host else _addresses(), listener.getsockname()[1], secrets.token_hex(16)]
        addresses, port, token = gather_json(offer)[0]
        if listener is not None:
            keeper = WatchdogServer(listener, token, topology.world_size)
        watch.connect(_connect(addresses, port, who, deadline_s), token, deadline_s)
    failed = True
    try:
        yield watch
        failed = False
    except BaseException as error:
        watch.failed(error)
        raise
    finally:
        watch.leave()
        if keeper is not None:
            keeper.close(failed=failed)

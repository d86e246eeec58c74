"""The watchdog: every rank reports its stage, and a failure on any rank ends the run on all with a named cause.

A stage is a part of the run, such as "update", that a rank's main thread is in.

Each rank has a watch thread, with a connection to rank 0's server thread. torch's TCPStore is not
used, for three reasons. A closed connection reports a killed process at once, without a heartbeat
that a busy interpreter would miss. TCP keepalive reports a lost host after about 25 s. A broken
TCPStore would print C++ stacks before the named error.

How a failure is found and told:

1. A rank that raises reports its error and its stage before its process groups close.
2. A rank whose connection closes before it says bye was killed. If it is rank 0, every rank sees
   the closed connection itself.
3. A rank whose collective fails, or has not ended after ``run.deadline_s``, asks the server thread
   which rank is the cause. If no rank raised or died within SETTLE_S seconds, the server asks every
   rank for its main thread's position. The guilty rank is one whose main thread does not wait for
   others. If all wait, it is one that has entered fewer stages.
4. Under gloo a collective that exceeds the deadline raises, and the main thread asks as in 3. Under
   NCCL such a collective would end the process without an error. So NCCL's groups have NCCL_GRACE_S
   seconds more, and the watch thread asks at the deadline.
5. A user's function in a rank's main thread (``own_code``, ``own_call``) may take
   ``run.deadline_s``. If it takes longer, the rank's watch thread reports it as the cause, even in a
   run of one rank. A function that waits for other ranks is not blamed: its collective has a
   deadline.
6. The first cause is sent to all ranks, once. A rank's main thread then has END_S seconds to end. A
   main thread that sleeps, or waits in a collective that nothing will end, cannot. Then the watch
   thread ends the process with ``os._exit``: Python cannot interrupt a thread that is in C.
7. Once a stage has taken ``run.slow_stage_s``, rank 0 reports each rank's stage and its duration.

The time before ``open_watchdog`` (building groups, loading weights) is not watched;
distributed/lost_rank.py names lost ranks there. Neither NCCL nor a second host has been tried.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from megatron_rl.distributed.collectives import gather_json
from megatron_rl.distributed.lost_rank import is_peer_failure
from megatron_rl.distributed.platform import HOST
from megatron_rl.distributed.rank_state import (
    ANSWER_S,
    BETWEEN,
    SETTLE_S,
    Cause,
    LongWait,
    RankState,
    SlowStages,
    where_is,
)
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    LockstepError,
    NonFiniteGradient,
    PeerError,
    RewardError,
)

if TYPE_CHECKING:
    from megatron_rl.distributed.watchdog_server import JsonConnection, WatchdogServer

log = logging.getLogger(__name__)

ASK_S = SETTLE_S + ANSWER_S + 5.0  # the main thread waits this long for the cause
END_S = 5.0  # after the cause, the main thread has this long to end by itself
LOOK_S = 0.5  # time between two looks at the duration of the main thread's stage
STACK_FRAMES = 12  # frames of an ended main thread that are printed
# errors that name their cause already
KNOWN_EVERYWHERE = (CheckpointError, ConfigError, EngineError, LockstepError, NonFiniteGradient, RewardError)


class Watchdog:
    """Watches this rank: the main thread reports its stages, and a watch thread keeps the connection to rank 0.

    In a run of one rank there is no connection, and the watch thread itself reports slow stages.

    who, server_who: this rank's and rank 0's names for messages.
    deadline_s: the limit in seconds for ``join``, for a user's function in the main thread and, with
        ``times_waits``, for each wait for other ranks.
    slow_stages: the reporter of slow stages in a run of one rank; None in a larger run, in which
        rank 0's server reports them.
    times_waits: whether the main thread's wait for other ranks counts as a failed collective once it
        takes ``deadline_s``, as is needed under NCCL (see 4 in the module's docstring).
    """

    def __init__(
        self,
        rank: int,
        who: str,
        server_who: str,
        deadline_s: float,
        slow_stages: SlowStages | None = None,
        *,
        times_waits: bool = False,
    ) -> None:
        self.rank, self.who, self.deadline_s = rank, who, deadline_s
        self._slow_stages = slow_stages
        self._own: tuple[str, float] | None = None  # the running user's function, and its start
        self._server = RankState(rank=0, who=server_who)
        self._stage, self._number, self._since = BETWEEN, 0, time.monotonic()
        self._main = threading.get_ident()
        self._long_wait = LongWait(self._main, deadline_s) if times_waits else None
        self._look_s = min(LOOK_S, self._long_wait.look_s) if times_waits else LOOK_S
        self._line: JsonConnection | None = None
        self._cause: Cause | None = None
        self._welcome = threading.Event()
        self._known = threading.Event()
        self._left = threading.Event()

    def start(self) -> None:
        """Start the watch thread."""
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def join(self, line: JsonConnection, token: str) -> None:
        """Register at rank 0's server and return when every rank has; raise PeerError after ``deadline_s``.

        line: this rank's connection to rank 0's server.
        token: the run's secret, by which the server knows its ranks.
        """
        self._line = line
        self._line.send(**{"is": "hello", "rank": self.rank, "who": self.who, "token": token})
        self.start()
        if not self._welcome.wait(self.deadline_s):
            raise PeerError(f"{self.who} waited {self.deadline_s:g} s for every rank to join the watch of rank 0")

    @property
    def doing(self) -> tuple[str, float]:
        """Return (the main thread's stage, the seconds since it began); any thread may call it."""
        return self._stage, time.monotonic() - self._since

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Return a context that sets this rank's stage to ``name``. After an error the name stays, for the report."""
        outer = self._stage
        self._enter(name)
        yield
        self._enter(outer)

    @contextlib.contextmanager
    def own_code(self, name: str) -> Iterator[None]:
        """Return a context for a call of a user's function, which may take ``run.deadline_s``.

        The rank reports the call as its stage ``name``. Nothing can interrupt the function, so a longer
        call ends this rank's process, and the run with it.
        """
        with self.stage(name), self.own_call(name):
            yield

    @contextlib.contextmanager
    def own_call(self, name: str) -> Iterator[None]:
        """Return a context that ends this rank's process, and the run, if its block exceeds ``run.deadline_s``.

        Unlike ``own_code`` it leaves the stage that the rank reports, such as "update", as it is.

        name: the block's name for the report.
        """
        outer, self._own = self._own, (name, time.monotonic())
        try:
            yield
        finally:
            self._own = outer

    def _enter(self, name: str) -> None:
        self._number += self._stage == BETWEEN  # nested stages do not count: not every rank enters them
        self._stage, self._since = name, time.monotonic()
        if self._line is not None:
            self._line.send(**{"is": "stage", "stage": name, "number": self._number})

    def failed(self, error: BaseException) -> None:
        """Report this rank's error to the other ranks; raise PeerError if another rank is the cause.

        error: the exception that ended the watched block.
        """
        self._left.set()
        if self._line is None:
            return
        others_fault = self._cause is not None and self._cause.rank != self.rank and isinstance(error, Exception)
        if not isinstance(error, KNOWN_EVERYWHERE) and (others_fault or is_peer_failure(error)):
            summary = f"{type(error).__name__}: {error}"[:500]
            self._line.send(**{"is": "lost", "error": summary})
            if self._known.wait(ASK_S):
                raise PeerError(self._cause.text) from error
            silence = f"{self._server.who}, which watches all ranks, did not report the cause in {ASK_S:g} s"
            raise PeerError(
                f"a collective failed on {self.who}, in {self._stage!r}, and {silence}: {summary}"
            ) from error
        error.add_note(
            f"{self.who} raised it; it had been in {self._stage!r} for {time.monotonic() - self._since:.1f} s"
        )
        self._line.send(**{"is": "raised", "error": f"{type(error).__name__}: {error}"[:2000]})

    def leave(self) -> None:
        """Stop watching this rank, which reports nothing afterwards."""
        self._left.set()
        if self._line is not None:
            self._line.send(**{"is": "bye"})

    def _run(self) -> None:
        end_at = None
        while end_at is None or time.monotonic() < end_at:
            messages = self._line.receive(self._look_s) if self._cause is None and self._line is not None else []
            if self._cause is not None and self._left.wait(0.1):
                return
            if self._line is None and self._left.wait(LOOK_S):
                return
            self._look()
            if messages is None:
                self._learn(self._server.gone())
            for message in messages or []:
                # rank 0 is done; after a cause this rank must still end
                if message["is"] == "bye" and self._cause is None:
                    return
                self._hear(message)
            if self._cause is not None and end_at is None:
                end_at = time.monotonic() + END_S
        self._end()

    def _look(self) -> None:
        """Report a slow stage, and a user's function in the main thread that takes longer than ``deadline_s``."""
        now, own = time.monotonic(), self._own
        if self._slow_stages is not None and self._cause is None:
            state = RankState(rank=self.rank, who=self.who, stage=self._stage, number=self._number, since=self._since)
            self._slow_stages.look([state], now)
        self._time_wait(now)
        if self._cause is not None or self._left.is_set() or own is None or now - own[1] <= self.deadline_s:
            return
        position, waits = where_is(self._main, in_own_code=True)
        if waits:
            return
        text = (
            f"{self.who} has been in {own[0]!r} for {now - own[1]:.1f} s, longer than run.deadline_s="
            f"{self.deadline_s:g} s, at {position}: a function in the rank's own process does not return; mend it, "
            "raise run.deadline_s, or call a reward in workers, which have a deadline for each sample "
            "(reward.num_workers)"
        )
        if self._line is not None:
            self._line.send(**{"is": "overdue", "text": text})
        self._learn(Cause(rank=self.rank, text=text))

    def _time_wait(self, now: float) -> None:
        """Ask rank 0's server which rank failed, if one wait of the main thread has lasted ``deadline_s``.

        This method asks at most once in a run.
        """
        if self._long_wait is None or self._line is None or self._cause is not None or self._left.is_set():
            return
        if position := self._long_wait.look(now, in_own_code=self._own is not None):
            self._long_wait = None
            self._line.send(
                **{"is": "lost", "error": f"a wait of {self.deadline_s:g} s (run.deadline_s) at {position}"}
            )

    def _hear(self, message: dict) -> None:
        match message["is"]:
            case "welcome":
                self._welcome.set()
            case "server":
                self._server.stage, self._server.since = message["stage"], time.monotonic()
            case "where":
                own = self._own
                position, waits = where_is(self._main, in_own_code=own is not None)
                position += f", in {own[0]!r}" if own is not None and own[0] != self._stage else ""
                self._line.send(**{"is": "answer", "at": position, "waits": waits, "left": self._left.is_set()})
            case "cause":
                self._learn(Cause(rank=message["rank"], text=message["text"]))

    def _learn(self, cause: Cause) -> None:
        self._cause = cause
        self._known.set()

    def _end(self) -> None:
        position, _ = where_is(self._main)
        frame = sys._current_frames().get(self._main)
        stack = "" if frame is None else "".join(traceback.format_stack(frame)[-STACK_FRAMES:])
        print(
            f"megatron_rl: {self._cause.text}\n{self.who} had not ended {END_S:g} s later, at {position}, and is "
            f"ended here; its main thread stood at:\n{stack}",
            file=sys.__stderr__,
            flush=True,
        )
        os._exit(1)


@contextlib.contextmanager
def open_watchdog(
    topology: Topology, deadline_s: float, *, slow_stage_s: float = 0.0, say: Callable[[str], None] = log.warning
) -> Iterator[Watchdog]:
    """Run the block under a watchdog on every rank, and yield the watchdog. A collective over the world.

    deadline_s: seconds that may pass until every rank has connected to rank 0's server, and that a
        call of a user's function may take in a rank's main thread.
    slow_stage_s: seconds in one stage after which rank 0 reports every rank's stage; 0 never
        reports.
    say: a function that takes the text of such a report.

    An error in any rank's block ends all ranks' blocks. A rank that did not cause the error raises
    a PeerError that names the guilty rank, its position and its stage.
    """
    who = topology.who(topology.rank)
    server: WatchdogServer | None = None
    listener, offer = None, None
    slow_stages = SlowStages(slow_stage_s, say)
    if topology.world_size == 1:
        watchdog = Watchdog(0, who, who, deadline_s, slow_stages)
        watchdog.start()
    # rank 0 offers its address, port and token; every rank connects
    else:
        from megatron_rl.distributed.watchdog_server import WatchdogServer, connect, listen, own_address

        hosts = gather_json([who, f"{socket.gethostname()} {uuid.getnode()}"])
        watchdog = Watchdog(topology.rank, who, hosts[0][0], deadline_s, times_waits=HOST.backend == "nccl")
        if topology.rank == 0:
            one_host = len({host for _, host in hosts}) == 1
            listener = listen("127.0.0.1" if one_host else own_address(), topology.world_size)
            offer = [*listener.getsockname()[:2], secrets.token_hex(16)]
        address, port, token = gather_json(offer)[0]
        if listener is not None:
            server = WatchdogServer(listener, token, topology.world_size, slow_stages)
        watchdog.join(connect(address, port, who, deadline_s), token)
    # a failure is reported before the watch ends
    has_failed = True
    try:
        yield watchdog
        has_failed = False
    except BaseException as error:
        watchdog.failed(error)
        raise
    finally:
        watchdog.leave()
        if server is not None:
            server.close(failed=has_failed)

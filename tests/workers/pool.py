"""Runs tasks on gloo worker processes that live as long as the test session.

    results = pool.run(2, my_function, "argument", timeout_s=30, option=3)
    # on each rank: my_function(rank, world, "argument", option=3)

The workers are forked from a process that has imported torch and Megatron. A task is a module-level function of an
importable module; arguments and results are pickled (tensors on the CPU, or numpy). For each task the first ``world``
workers form a new gloo world; afterwards they leave every process group, Megatron's too.

What is NOT fresh: a worker keeps what it imported, and with it module globals, patches of torch.cuda, entered
TorchFunctionModes, default dtypes and RNG state. A task that needs a seed sets it; a task that must start in a pristine
process is a subprocess test, not a pool test. A task that leaves globals changed says so: ``spoils=True``.

Bounds, each times MEGATRON_RL_TEST_PATIENCE: a task ends within LOADED · ``timeout_s``, or within GRACE_S after the
first rank raised or died. Ranks that have not finished by then are asked for their stacks and killed; the next task
starts new ones.

Protocol, one duplex pipe per worker, pickled tuples: worker ("ready",) | pool (sys.path, payload) | worker ("returned",
result) or ("raised", summary, traceback) | pool ("leave",) when all ranks have reported | worker ("idle",).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Pipe, wait
from typing import Any

from tests.patience import patient, until
from tests.workers.nursery import ONLY_TORCH, Nursery

START_S = 300.0  # a worker is forked in milliseconds, from a nursery that imports for some seconds first
# tests say what a task takes at most on two free cores; with as many others on each core it has taken four times that
LOADED = 5.0
# after a rank failed, the others have this long to fail too (a lockstep check does) before they count as hung
GRACE_S = 30.0
LEAVE_S = 120.0
STACKS_S = 10.0  # until a hung rank has written where it stands; one that is stopped never does
# of a worker between tasks: what Megatron-Core's modules keep of destroyed groups keeps two threads of each
MOST_THREADS = 400
STACK_ENDS = "in <module>"  # of the main thread, which faulthandler writes last
SHOWN_CHARS = 6000  # of each rank's output, from its end


class PoolError(AssertionError):
    """A task did not return on every rank: ``failed`` have raised or died, ``hung`` did not finish."""

    def __init__(self, message: str, failed: tuple[int, ...], hung: tuple[int, ...]) -> None:
        super().__init__(message)
        self.failed, self.hung = failed, hung


class Worker:
    """One process, its pipe, and the file that its stdout and stderr go to."""

    def __init__(self, nursery: Nursery, rank: int, store_port: int) -> None:
        self.rank = rank
        self.log = tempfile.TemporaryFile(mode="w+b", buffering=0)  # noqa: SIM115 (closed by kill)
        self.pipe, theirs = Pipe()
        # the end of what nobody writes tells a worker that the pool's process is gone
        its_stdin, self._life = os.pipe()
        ends = {"printed": self.log.fileno(), "stdin": its_stdin, "pipe": theirs.fileno()}
        self.process = nursery.start("tests.workers.worker:serve", [store_port, rank], **ends)
        os.close(its_stdin)
        theirs.close()

    def send(self, *message: Any) -> None:
        """Send a message; a worker that is already dead is found by ``receive``, which follows every send."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send_bytes(pickle.dumps(message))

    def receive(self) -> tuple[Any, ...]:
        """Return the next message; ("died", how) where there will be none."""
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return "died", self.death()

    def death(self) -> str:
        try:
            code = self.process.wait(patient(LEAVE_S))
        except subprocess.TimeoutExpired:
            return "closed its pipe and lives on"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def num_threads(self) -> int:
        """Return the worker's number of threads, 0 where the system does not say."""
        folder = pathlib.Path(f"/proc/{self.process.pid}/task")
        return len(list(folder.iterdir())) if folder.is_dir() else 0

    def num_printed(self) -> int:
        """Return how many bytes the current task has written."""
        return os.fstat(self.log.fileno()).st_size

    def printed(self, since: int = 0) -> str:
        """Return the end of what the current task wrote; by pread, as the worker shares this file's offset."""
        size = self.num_printed()
        start = max(since, size - SHOWN_CHARS)
        return os.pread(self.log.fileno(), size - start, start).decode(errors="replace").strip()

    def forget_printed(self) -> None:
        os.ftruncate(self.log.fileno(), 0)
        os.lseek(self.log.fileno(), 0, os.SEEK_SET)

    def kill(self) -> None:
        """Kill the process and what it started: it leads a session of its own."""
        self.process.kill()
        self.process.wait(patient(LEAVE_S))
        os.close(self._life)
        self.pipe.close()
        self.log.close()


class Pool:
    """Up to ``max_world`` workers, started when a task first needs them; worker i is rank i of every task."""

    def __init__(self, max_world: int = 4, grace_s: float = GRACE_S, nursery: Nursery | None = None) -> None:
        """nursery: the one that forks the workers; None for one of its own, which imports torch only."""
        self.max_world, self.grace_s = max_world, patient(grace_s)
        self._workers: dict[int, Worker] = {}
        self._num_tasks = 0
        self._store: Any = None
        self._nursery, self._own_nursery = nursery, None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._kill(list(self._workers))
        if self._own_nursery is not None:
            self._own_nursery.close()
        self._store = self._own_nursery = None

    def run(
        self,
        world: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        spoils: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``function(rank, world, *args, **kwargs)`` on ``world`` ranks; return its results in rank order.

        spoils: whether it changes what modules hold, so that the next task needs other workers.

        Raises PoolError, with ranks, tracebacks and output, where one raises, dies or outlives LOADED · ``timeout_s``.
        """
        if not 1 <= world <= self.max_world:
            raise ValueError(
                f"world={world} is outside [1, max_world={self.max_world}]; ask for less, or Pool(max_world=…)"
            )
        name = f"{function.__module__}:{function.__qualname__}"
        if function.__module__ == "__main__" or "<" in function.__qualname__:
            raise ValueError(f"{name} cannot be imported by a worker; make it a module-level function of a test module")
        timeout_s = patient(LOADED * timeout_s)
        self._num_tasks += 1
        task = (self._num_tasks, world, function.__module__, function.__qualname__, args, kwargs, timeout_s)
        payload = pickle.dumps(task)
        ranks = list(range(world))
        try:
            self._start(ranks)
            for rank in ranks:
                self._workers[rank].forget_printed()
                self._workers[rank].send(sys.path, payload)
            outcomes = self._collect(ranks, timeout_s, self.grace_s)
            if len(outcomes) == world and all(kind != "died" for kind, *_ in outcomes.values()):
                self._leave_groups(ranks)
            if any(kind != "returned" for kind, *_ in outcomes.values()) or len(outcomes) < world:
                raise self._error(name, ranks, outcomes, timeout_s)
        except BaseException as error:
            # Ranks that all raised are idle again and can be kept; anything else (hung, dead, Ctrl-C) leaves an unknown
            # state.
            if not isinstance(error, PoolError) or error.hung or any(outcomes[r][0] == "died" for r in error.failed):
                self._kill(ranks)
            raise
        # the next task starts fresh ones
        self._kill([rank for rank in ranks if spoils or self._workers[rank].num_threads() > MOST_THREADS])
        return [pickle.loads(outcomes[rank][1]) for rank in ranks]

    def _start(self, ranks: list[int]) -> None:
        if self._store is None:
            from torch.distributed import TCPStore  # here, so that sessions that use no pool do not import torch for it

            # Held by this process: no rank's death takes the rendezvous with it, and the port is the system's choice.
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        dead = [rank for rank in ranks if rank in self._workers and self._workers[rank].process.poll() is not None]
        self._kill(dead)
        new = [rank for rank in ranks if rank not in self._workers]
        if new and self._nursery is None and self._own_nursery is None:
            self._own_nursery = Nursery(ONLY_TORCH)
        for rank in new:
            self._workers[rank] = Worker(self._nursery or self._own_nursery, rank, self._store.port)
        ready = self._collect(new, patient(START_S), 0.0)
        late = [rank for rank in new if ready.get(rank) != ("ready",)]
        if late:
            printed = [f"rank {rank}: {ready.get(rank, 'silent')}\n{self._workers[rank].printed()}" for rank in late]
            raise RuntimeError("\n".join([f"workers {late} of the pool were not ready in {START_S} s:", *printed]))

    def _collect(self, ranks: list[int], timeout_s: float, grace_s: float) -> dict[int, tuple[Any, ...]]:
        """Collect one message from each rank, or none from those that send none in time."""
        outcomes: dict[int, tuple[Any, ...]] = {}
        deadline = time.monotonic() + timeout_s
        while len(outcomes) < len(ranks) and (left := deadline - time.monotonic()) > 0:
            waiting = {self._workers[rank].pipe: rank for rank in ranks if rank not in outcomes}
            # Not only the pipes: a child that a worker forked keeps the worker's end open beyond its death.
            gone = [pipe for pipe, rank in waiting.items() if self._workers[rank].process.poll() is not None]
            for pipe in set(wait(list(waiting), timeout=0.0 if gone else min(left, 0.2))) | set(gone):
                rank = waiting[pipe]
                outcomes[rank] = self._workers[rank].receive() if pipe.poll() else ("died", self._workers[rank].death())
                if outcomes[rank][0] in ("raised", "died"):
                    deadline = min(deadline, time.monotonic() + grace_s)
        return outcomes

    def _leave_groups(self, ranks: list[int]) -> None:
        for rank in ranks:
            self._workers[rank].send("leave")
        left = self._collect(ranks, patient(LEAVE_S), patient(LEAVE_S))
        stuck = [rank for rank in ranks if left.get(rank) != ("idle",)]
        if stuck:
            printed = [self._workers[rank].printed() for rank in stuck]
            raise RuntimeError("\n".join([f"ranks {stuck} did not leave their groups in {LEAVE_S} s:", *printed]))

    def _error(self, name: str, ranks: list[int], outcomes: dict[int, tuple[Any, ...]], timeout_s: float) -> PoolError:
        hung = tuple(rank for rank in ranks if rank not in outcomes)
        failed = tuple(rank for rank in ranks if rank in outcomes and outcomes[rank][0] != "returned")
        self._ask_for_stacks(hung)
        # The causes, in the order in which they arrived, before the ranks that merely waited for them.
        causes = [rank for rank in outcomes if rank in failed]
        raised = {rank: "raised " if outcomes[rank][0] == "raised" else "" for rank in causes}
        late = f"did not finish in {timeout_s:g} s" + (" (or soon enough after a failure)" if failed else "")
        ends = [f"rank {rank} {raised[rank]}{outcomes[rank][1]}" for rank in causes]
        ends += [f"rank {rank} {late}" for rank in hung]
        parts = [f"{name} on {len(ranks)} ranks: {'; '.join(ends)}"]
        for rank in causes + list(hung):
            if rank in outcomes and outcomes[rank][0] == "raised":
                parts.append(f"--- rank {rank}, traceback:\n{outcomes[rank][2].rstrip()}")
            if printed := self._workers[rank].printed():
                parts.append(f"--- rank {rank} printed{' (with its stacks)' if rank in hung else ''}:\n{printed}")
        return PoolError("\n".join(parts), failed, hung)

    def _ask_for_stacks(self, hung: Sequence[int]) -> None:
        """Return when each has written where its threads stand, the main one last, or did not within STACKS_S."""
        sizes = {rank: self._workers[rank].num_printed() for rank in hung}
        for rank in hung:
            self._workers[rank].process.send_signal(signal.SIGUSR1)  # faulthandler writes to the worker's stderr
        for rank, size in sizes.items():
            until(lambda rank=rank, size=size: STACK_ENDS in self._workers[rank].printed(size), STACKS_S)

    def _kill(self, ranks: list[int]) -> None:
        for rank in ranks:
            if rank in self._workers:
                self._workers.pop(rank).kill()

"""The agreement of a job's ranks before training: all are ready, or one message says why not, printed once.

A launcher ends every rank as soon as one rank has left. So a rank that leaves first could end the
rank that has the message. Hence:

1. A rank that cannot start writes its message to the job's store; the first message counts. Rank 0
   prints it. All other ranks wait until it is printed, at most GRACE_S seconds, before they leave.
2. Rank 0 reads the store when all ranks meet before the model is built (``wait_for_all``). So it
   prints another rank's message, for example about a file that one host lacks.
3. If rank 0 prints nothing, for example because it waits in a collective, one of the failed ranks
   prints its own message after GRACE_S seconds.

The store is a key-value store of torch.distributed. Torchrun keeps it, or rank 0 at MASTER_ADDR and
MASTER_PORT.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import socket
import sys
import time
from typing import TYPE_CHECKING

from megatron_rl.errors import ConfigError, PeerError

if TYPE_CHECKING:
    from torch.distributed import Store

GRACE_S = 10.0
MOST_CHARACTERS = 4000
READY = "ready"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Holds this process's rank, the number of the job's processes, and the store by which they agree.

    store: the job's key-value store; None for a single process.
    grace_s: longest wait, in seconds, for another rank to print why the job cannot start, or to leave.
    """

    rank: int
    size: int
    store: Store | None
    grace_s: float = GRACE_S

    @property
    def round(self) -> int:
        """Return how many times all ranks have met in ``wait_for_all``."""
        return self.store.add("arrived", 0) // self.size

    def wait_for_all(self, deadline_s: float) -> None:
        """Return when every rank has called this method; a collective.

        Raises ConfigError with the message of a rank that cannot start. Raises PeerError if a rank
        has not called it within ``deadline_s`` seconds.
        """
        if self.store is None:
            return
        number = self.store.add("arrived", 1)
        key = f"verdict/{(number - 1) // self.size}"
        if number % self.size == 0:
            self.store.compare_set(key, "", READY)
        if not self._waits(key, deadline_s):
            from megatron_rl.distributed.lost_rank import ADVICE, UNNAMED, gone

            lost = "" if (who := gone()) == UNNAMED else f"; it lost {who}: {ADVICE}"
            raise PeerError(
                f"rank {self.rank} waited {deadline_s:g} s (run.deadline_s) for all {self.size} ranks to read model "
                f"and data; see their logs{lost}"
            )
        if (verdict := self.store.get(key).decode()) != READY:
            found = json.loads(verdict)
            raise ConfigError(f"rank {found['rank']} on {found['host']}: {found['message']}")

    def tell(self, key: str, text: str) -> None:
        """Write a text to the store under ``key``, for the other ranks to read by ``told``."""
        if self.store is not None:
            self.store.set(f"{key}/{self.round}", text)

    def told(self, key: str, seconds: float) -> str | None:
        """Return another rank's text for ``key``; None if none comes within ``seconds``."""
        key = f"{key}/{self.round}"
        return self.store.get(key).decode() if self._waits(key, seconds) else None

    def print_once(self, message: str) -> None:
        """Print on one rank's stderr why this job cannot start, and return after it was printed."""
        if self.store is None:
            _print(message)
            return
        number = self.round
        own = json.dumps({"rank": self.rank, "host": socket.gethostname(), "message": message})
        self.store.compare_set(f"verdict/{number}", "", own)
        said = f"said/{number}"
        if self.rank == 0:
            _print(message)
            self.store.set(said, "")
            self._linger(number)
        elif not self._waits(said, self.grace_s) and self.store.add(f"claimed/{number}", 1) == 1:
            _print(f"rank {self.rank} on {socket.gethostname()}: {message}")
            self.store.set(said, "")
        else:
            self._waits(said, self.grace_s)
        self.store.add(f"left/{number}", 1)

    def _linger(self, number: int) -> None:
        """Wait until the other ranks have left, since the store may end with this process.

        Then set the store's count of calls of ``wait_for_all`` as if every rank had called it. So the
        next call begins a new meeting, even if a rank never came to this one.

        number: the number of earlier meetings of all ranks (the property ``round``).
        """
        end = time.monotonic() + self.grace_s
        while self.store.add(f"left/{number}", 0) < self.size - 1 and time.monotonic() < end:
            time.sleep(0.02)
        self.store.add("arrived", (number + 1) * self.size - self.store.add("arrived", 0))

    def _waits(self, key: str, seconds: float) -> bool:
        from torch.distributed import DistStoreError

        try:
            self.store.wait([key], datetime.timedelta(seconds=seconds))
        except DistStoreError:
            return False
        return True


def this_job(*, deadline_s: float = GRACE_S) -> Job:
    """Return this process's Job, from the process group that it has joined, else from the launcher's variables.

    deadline_s: longest time in seconds for the store to answer.

    Raises PeerError if the store does not answer.
    """
    environment = os.environ
    if "torch" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized() and dist.get_world_size() == 1:
            return Job(rank=0, size=1, store=None)
        if dist.is_initialized():
            store = dist.PrefixStore("agreement", dist.distributed_c10d._get_default_store())
            return Job(rank=dist.get_rank(), size=dist.get_world_size(), store=store)
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(environment) or environment["WORLD_SIZE"] == "1":
        return Job(rank=0, size=1, store=None)
    store = _store_of_launcher(deadline_s)
    return Job(rank=int(environment["RANK"]), size=int(environment["WORLD_SIZE"]), store=store)


@functools.cache
def _store_of_launcher(deadline_s: float) -> Store:
    """Return the job's store, connected once per process.

    It is kept as long as the process lives, since rank 0's process may serve the store to all
    other ranks.
    """
    import torch.distributed as dist

    from megatron_rl.distributed.rendezvous import meet

    store, _, _ = meet(deadline_s)
    return dist.PrefixStore("agreement", store)


def announce(message: str) -> None:
    """Print on one rank why the job cannot start, before any rank leaves.

    The message also goes to torchrun's report.
    """
    if len(message) > MOST_CHARACTERS:
        message = f"{message[:MOST_CHARACTERS]}… ({len(message)} characters)"
    _tell_torchrun(message)
    try:
        this_job().print_once(message)
    except (RuntimeError, OSError, ValueError) as error:  # a store that is gone must not hide the message
        _print(f"{message} [the ranks could not agree on one message: {type(error).__name__}]")


def _print(message: str) -> None:
    print(f"megatron_rl: {message}", file=sys.stderr, flush=True)


def _tell_torchrun(message: str) -> None:
    """Write the message to the file from which torchrun's final report takes a rank's error (torch 2.6 to 2.13)."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        report = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:  # the message is printed anyway
            json.dump(report, file)

"""The link between the policy's ranks and a separate critic's ranks: two worlds of one job that exchange messages.

Under ``critic.placement=separate`` a job of W ranks has two worlds (sets of ranks with a default
process group of their own). Ranks 0 to W − C − 1 are the policy's, the last C ranks the critic's.
Megatron-Core in one world does not see the other. Requests and answers are numbered keys in the
job's key-value store; every rank of the other world reads them. Arrays go only between the two
worlds' first ranks, over a gloo group of these two, and are broadcast from there.

Every BEAT_S seconds each world's first rank writes a sign of life (a beat) to the store. So
rollouts and a critic's steps may take long, bounded only by their own world's deadlines. A lost
world is still noticed.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.distributed.collectives import broadcast_on_host
from megatron_rl.distributed.platform import HOST
from megatron_rl.distributed.rendezvous import join_world, meet
from megatron_rl.errors import ConfigError, PeerError
from megatron_rl.validate.critic import policy_ranks

BEAT_S = 5.0
POLL_S = 1.0
ALIVE, FAILED = "alive", "failed"
Arrays = Mapping[str, np.ndarray]


@contextlib.contextmanager
def joined(num_critic: int, deadline_s: float, *, of_critic: bool) -> Iterator[PolicyCriticLink]:
    """Join this process's world, the policy's or the critic's, and yield its end of the link.

    num_critic: the number of the critic's ranks.
    deadline_s: ``run.deadline_s``, the longest wait for another rank.
    of_critic: whether this process is one of the critic's ranks.

    If the ``with`` block raises, the ranks of the other world are told and stop waiting.
    """
    link = PolicyCriticLink(
        of_critic=of_critic,
        num_policy=policy_ranks_here(num_critic),
        num_critic=num_critic,
        deadline_s=deadline_s,
    )
    try:
        yield link
    except BaseException as error:
        link.say_failed(f"{type(error).__name__}: {error}")
        raise
    finally:
        link.close()


def policy_ranks_here(num_critic: int) -> int:
    """Return the number of this job's ranks that are left to the policy beside a separate critic.

    Raises ConfigError if none is left.
    """
    return policy_ranks(num_critic, int(os.environ["WORLD_SIZE"]))


def holds_critic(num_critic: int) -> bool:
    """Return whether this process is one of the ``num_critic`` ranks of a separate critic. Not a collective.

    Raises ConfigError outside a job of several ranks.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "critic.placement=separate needs several ranks; start them with torchrun or srun, or set "
            "critic.placement=shared"
        )
    return int(os.environ["RANK"]) >= policy_ranks_here(num_critic)


def local_policy_ranks(num_critic: int, rank: int, local_rank: int, local_world_size: int) -> int:
    """Return how many of this node's ranks hold the policy, beside a separate critic. Not a collective.

    rank, local_rank: this process's rank in the job and on its node.
    local_world_size: the number of the node's ranks.
    """
    return min(local_world_size, policy_ranks_here(num_critic) - (rank - local_rank))


class PolicyCriticLink:
    """Holds one rank's end of the link between the policy's and the critic's ranks."""

    def __init__(self, *, of_critic: bool, num_policy: int, num_critic: int, deadline_s: float) -> None:
        """Join this rank's world, the policy's or the critic's. A collective over all ranks of the job.

        of_critic: whether this rank is one of the critic's.
        num_policy, num_critic: the numbers of ranks of the two worlds.
        deadline_s: ``run.deadline_s``, the longest wait for another rank.
        """
        self.deadline_s, self.of_critic = deadline_s, of_critic
        bound = datetime.timedelta(seconds=self.deadline_s)
        store, rank, _ = meet(self.deadline_s)
        first, count = (num_policy, num_critic) if of_critic else (0, num_policy)
        name = "critic" if of_critic else "policy"
        join_world(HOST.backend, dist.PrefixStore(name, store), rank - first, count, self.deadline_s)
        self.is_first = rank == first
        self.store = dist.PrefixStore("bridge", store)
        self.is_told_to_leave = False  # True after a signal; the policy's ranks decide when the run ends, if they live
        self.group = None
        if self.is_first:
            self.group = dist.ProcessGroupGloo(dist.PrefixStore("arrays", self.store), int(of_critic), 2, bound)
        self._left = threading.Event()
        self.name, self.other = ("critic", "policy") if of_critic else ("policy", "critic")
        if self.is_first:
            threading.Thread(target=self._keep_beating, daemon=True, name="critic-bridge").start()

    def _keep_beating(self) -> None:
        number = 0
        while not self._left.wait(BEAT_S):
            number += 1
            with contextlib.suppress(dist.DistError):  # if the store is gone, the waiting thread sees it too
                self.store.set(f"{ALIVE}/{self.name}", str(number))

    def close(self) -> None:
        self._left.set()

    # ---- messages --------------------------------------------------------------------------------------------------

    def tell(self, key: str, content: Mapping[str, object], arrays: Arrays | None = None) -> None:
        """Send a message from the policy's ranks to the critic's, or back. Not a collective.

        Only the first rank of the sending side calls it. It returns when the first rank of the other
        side has received the arrays.

        key: the message's key in the store.
        content: the message's JSON-able fields, which the store keeps.
        arrays: arrays by name, which are sent over the gloo group; None for none.
        """
        blob = _packed(arrays) if arrays else b""
        self.store.set(key, json.dumps({**content, "bytes": len(blob)}))
        if blob:
            self.group.send([torch.frombuffer(bytearray(blob), dtype=torch.uint8)], int(not self.of_critic), 0).wait()

    def hear(self, key: str) -> dict:
        """Wait for the message under ``key`` and return it without its arrays. Any rank may call it.

        The message comes from the critic's ranks to the policy's, or back. Raises PeerError if either
        side failed, or if the sender gave no sign of life for ``run.deadline_s`` seconds. Once this
        rank got SIGTERM, SIGUSR1 or SIGINT, 3 · BEAT_S seconds are the limit if that is shorter.
        """
        heard, since = self._beat_heard(), time.monotonic()
        while True:
            try:
                self.store.wait([key], datetime.timedelta(seconds=POLL_S))
                return json.loads(self.store.get(key))
            except dist.DistStoreError:
                now = self._beat_heard()
                if now != heard:
                    heard, since = now, time.monotonic()
            patience_s = min(self.deadline_s, 3 * BEAT_S) if self.is_told_to_leave else self.deadline_s
            if time.monotonic() - since >= patience_s:
                raise PeerError(
                    f"no message {key!r} and no sign of life from the {self.other}'s ranks for {patience_s:g} s "
                    "(run.deadline_s); see their log"
                )

    def say_failed(self, reason: str) -> None:
        """Record in the store that a rank of this side failed for ``reason``; policy and critic then stop waiting.

        If the job's store is gone, which also ends their waits, it does nothing. Not a collective.
        """
        with contextlib.suppress(dist.DistError):
            if not self.store.check([FAILED]):  # the first cause counts
                self.store.set(FAILED, f"a rank of the {self.name} failed: {reason}")

    def _beat_heard(self) -> str | None:
        if self.store.check([FAILED]):
            raise PeerError(self.store.get(FAILED).decode())
        key = f"{ALIVE}/{self.other}"
        return self.store.get(key).decode() if self.store.check([key]) else None

    def arrays(self, said: Mapping[str, object]) -> dict[str, np.ndarray]:
        """Return a received message's arrays by name. A collective over the ranks of this side, policy or critic.

        said: the message, as ``hear`` returned it.
        """
        blob = torch.empty(said["bytes"], dtype=torch.uint8)
        if not said["bytes"]:
            return {}
        if self.is_first:
            self.group.recv([blob], int(not self.of_critic), 0).wait()
        return _unpacked(broadcast_on_host(blob).numpy().tobytes())


def _packed(arrays: Arrays) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def _unpacked(blob: bytes) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(blob), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}

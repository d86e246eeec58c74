"""The process group of a broadcast: the trainer, rank 0, and the workers of every engine that it sends to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from megatron_rl.rollout.engines.replica import Replica
from megatron_rl.rollout.weight_sync.transport import broadcast, listen, open_group


class BroadcastGroup:
    """Brings each bucket to all engines at once. One engine that is gone ends it, for all."""

    def __init__(self, device: torch.device, address: str, deadline_s: float, *, holds: bool = False) -> None:
        """Remember where the group meets. holds: whether the engines are to hold what they receive."""
        self._holds = holds
        self._device, self._address, self._deadline_s = device, address, deadline_s
        self._group = None
        self._members: list[Replica] = []

    def spans(self, replicas: Sequence[Replica]) -> bool:
        """Tell whether these replicas, and no others, are in the group."""
        return self._group is not None and {id(x) for x in replicas} == {id(x) for x in self._members}

    def holds(self, replica: Replica) -> bool:
        return any(x is replica for x in self._members)

    def open(
        self, workers: Sequence[tuple[Replica, int]], invite: Callable[[Replica, dict[str, object]], None]
    ) -> None:
        """Meet all workers in a group of their own. Raises RuntimeError where one stays away.

        workers: each replica with the number of its workers, which take ranks in this order.
        invite: tells a replica to join, without waiting for its answer.
        """
        self.close()
        world = 1 + sum(count for _, count in workers)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        listener = listen(self._address)
        address, port = listener.getsockname()[:2]
        info = {
            "channel": "broadcast",
            "holds": self._holds,
            "deadline_s": self._deadline_s,
            "address": address,
            "port": port,
        }
        first = 1
        for replica, count in workers:
            invite(replica, {**info, "first_rank": first, "world_size": world, "group_backend": backend})
            first += count
        self._group = open_group(listener, world, backend, timedelta(seconds=self._deadline_s))
        self._members = [replica for replica, _ in workers]

    def broadcast(self, packed: torch.Tensor) -> None:
        broadcast(self._group, packed)

    def close(self) -> None:
        """Leave the group, so that a worker that still waits in it is told. NCCL's kernels under way end, too."""
        group, self._group, self._members = self._group, None, []
        if group is not None:
            group.abort()
            del group  # gloo closes its connections with its last reference

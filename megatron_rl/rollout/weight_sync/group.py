"""The process group of a broadcast: the trainer as rank 0, and the workers of every engine that gets the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from megatron_rl.rollout.engines.replica import Replica
from megatron_rl.rollout.weight_sync.transport import broadcast, listen, open_group


class BroadcastGroup:
    """Broadcasts each bucket of weights to all engines at once. If one engine is lost, the group ends for all."""

    def __init__(self, device: torch.device, address: str, deadline_s: float, *, holds: bool = False) -> None:
        """Store the settings. ``open`` opens the group.

        address: this host's address, to which the engines' workers connect.
        deadline_s: seconds for opening the group, and for each broadcast.
        holds: whether the engines keep copies of the buckets that they receive.
        """
        self._holds = holds
        self._device, self._address, self._deadline_s = device, address, deadline_s
        self._group = None
        self._members: list[Replica] = []

    def spans(self, replicas: Sequence[Replica]) -> bool:
        """Return whether exactly these replicas are in the group."""
        return self._group is not None and {id(x) for x in replicas} == {id(x) for x in self._members}

    def holds(self, replica: Replica) -> bool:
        return any(x is replica for x in self._members)

    def open(
        self, workers: Sequence[tuple[Replica, int]], invite: Callable[[Replica, dict[str, object]], None]
    ) -> None:
        """Close the earlier group, and open a new one with all workers. Raises RuntimeError if a worker does not join.

        workers: (replica, number of its workers) pairs. The workers take ranks in this order, from
            1.
        invite: called with a replica and the fields of the group's ``ChannelInfo``; tells the
            replica to join, without waiting.
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
        """Abort the group. Workers that wait in it stop waiting, and NCCL's kernels that still run are ended."""
        group, self._group, self._members = self._group, None, []
        if group is not None:
            group.abort()
            del group  # gloo closes its connections when the last reference is gone

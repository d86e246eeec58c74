"""The encoder of buckets in the sender: its interface, and the plain form, which sends whole buckets to all engines.

A bucket is a batch of weight tensors, packed into one array of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_rl.rollout.engines.replica import Replica, WeightReceipt
from megatron_rl.rollout.weight_sync.double_buffer import BucketBuffer

Part = tuple[dict[str, object], torch.Tensor]  # a message, and the bytes that are sent with it (uint8)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedBucket:
    """Holds a bucket as it is sent to each replica.

    checksum: the checksum of the whole bucket, even if only its changes are sent.
    parts: a replica's id → (message, uint8 tensor of bytes) to send to the replica. A replica
        without an entry is dropped from the sync.
    error: why some replicas have no entry; None if all replicas have one.
    """

    checksum: str
    parts: Mapping[int, Part]
    error: OSError | None = None


class BucketEncoder(Protocol):
    """Decides which bytes of each bucket are sent to which replica. One encoder serves all syncs of one sender.

    holds: whether engines keep copies of the buckets that they receive.
    finishing: the names of control methods that are called on an engine at the end of a sync.
    changed_share: the fraction of the latest sync's elements that changed; None if none were
        compared.

    ``greet`` and ``took`` are called in a replica's thread.
    """

    holds: bool
    finishing: Sequence[str]
    changed_share: float | None

    def open(self, version: int, replicas: Sequence[Replica]) -> None:
        """Begin a sync of weight ``version`` to these replicas, before any message is sent to them."""
        ...

    def greet(self, replica: Replica, deadline_s: float) -> bool:
        """Check which weights a replica holds, before its update; return whether its channel must be opened again.

        deadline_s: seconds for the replica's answer.
        """
        ...

    def begin(self, living: Sequence[Replica], *, alike: bool) -> None:
        """Before the first bucket, decide which replicas get whole buckets, and which only the changes.

        living: the replicas that are still in the sync.
        alike: whether all replicas must get the same bytes (a broadcast).
        """
        ...

    def encode(self, buffer: BucketBuffer, living: Sequence[Replica]) -> EncodedBucket:
        """Return the bucket in ``buffer`` as it is sent to each replica of ``living``."""
        ...

    def end(self, living: Sequence[Replica]) -> Mapping[str, object]:
        """Note that all buckets were sent to ``living``; return the further fields of the sync's end message.

        The sender itself adds the version, and the number and checksum of the tensors.
        """
        ...

    def took(self, replica: Replica, receipt: WeightReceipt) -> None:
        """Note that a replica has completed the sync, and that its workers answered with this receipt."""
        ...

    def forget(self, replica: Replica) -> None:
        """Forget a replica's state, since its engine was replaced or has failed."""
        ...

    def lacks_weights(self, replica: Replica) -> bool:
        """Return whether the replica lacks the model's frozen weights, so that LoRA adapters alone do not suffice."""
        ...


class WholeEncoder:
    """Sends every bucket whole to every engine. It is a ``BucketEncoder``."""

    holds, finishing = False, ()
    changed_share: float | None = None

    def open(self, version: int, replicas: Sequence[Replica]) -> None:
        """Do nothing: every replica gets the same bytes."""

    def greet(self, replica: Replica, deadline_s: float) -> bool:
        return False

    def begin(self, living: Sequence[Replica], *, alike: bool) -> None:
        """Do nothing: no bucket depends on an earlier one."""

    def encode(self, buffer: BucketBuffer, living: Sequence[Replica]) -> EncodedBucket:
        message = buffer.message(whole=bool(living))
        part = (message, buffer.packed)
        return EncodedBucket(checksum=message["checksum"], parts={id(x): part for x in living})

    def end(self, living: Sequence[Replica]) -> Mapping[str, object]:
        return {}

    def took(self, replica: Replica, receipt: WeightReceipt) -> None:
        """Do nothing: the next sync needs no receipt."""

    def forget(self, replica: Replica) -> None:
        """Do nothing: no state is kept for a replica."""

    def lacks_weights(self, replica: Replica) -> bool:
        return True

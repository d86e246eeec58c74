"""The encoder of a bucket, at the sender's end: its interface, and its plain form, whole buckets for all engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_rl.rollout.engines.replica import Replica, WeightReceipt
from megatron_rl.rollout.weight_sync.double_buffer import BucketBuffer

Part = tuple[dict[str, object], torch.Tensor]  # a message, and the bytes that travel with it: uint8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedBucket:
    """Holds what a bucket is sent as.

    checksum: of the whole bucket, however it travels.
    parts: by a replica's id; one that has none is dropped from the sync, for the error.
    """

    checksum: str
    parts: Mapping[int, Part]
    error: OSError | None = None


class BucketEncoder(Protocol):
    """Encodes the buckets of one sender's syncs, in order. ``greet`` and ``took`` are called in a replica's thread."""

    holds: bool  # whether engines keep the buckets that they receive
    finishing: Sequence[str]  # control methods by which an engine is called after a sync's finish
    changed_share: float | None  # of the latest sync's elements; None where none were compared

    def open(self, version: int, replicas: Sequence[Replica]) -> None:
        """Begin a sync to these replicas, before anything is said to them."""
        ...

    def greet(self, replica: Replica, deadline_s: float) -> bool:
        """Look at a replica before its update starts, and return whether its own channel is to be opened anew."""
        ...

    def begin(self, living: Sequence[Replica], *, alike: bool) -> None:
        """Prepare for the first bucket; ``alike``: all replicas get the same bytes, as by a broadcast."""
        ...

    def encode(self, buffer: BucketBuffer, living: Sequence[Replica]) -> EncodedBucket:
        """Return a bucket as each living replica gets it."""
        ...

    def end(self, living: Sequence[Replica]) -> Mapping[str, object]:
        """End the buckets of a sync, and return what the message of its end says beside the totals."""
        ...

    def took(self, replica: Replica, receipt: WeightReceipt) -> None:
        """Note that a replica has taken the sync whole, with this receipt."""
        ...

    def forget(self, replica: Replica) -> None:
        """Forget a replica whose engine is another one now."""
        ...

    def lacks_weights(self, replica: Replica) -> bool:
        """Tell whether adapters alone would find no weights there to which they belong."""
        ...


class WholeEncoder:
    """Sends every bucket whole to every engine. It is a ``BucketEncoder``."""

    holds, finishing = False, ()
    changed_share: float | None = None

    def open(self, version: int, replicas: Sequence[Replica]) -> None:
        """Do nothing: what a replica has does not matter."""

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
        """Do nothing: the next sync asks for no receipt."""

    def forget(self, replica: Replica) -> None:
        """Do nothing: nothing is known of a replica."""

    def lacks_weights(self, replica: Replica) -> bool:
        return True

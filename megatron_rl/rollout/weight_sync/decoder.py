"""The decoder of buckets in the engine's process: its interface, and the plain form for buckets that are sent whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch


class BucketDecoder(Protocol):
    """Decodes the buckets of one trainer's syncs, in order."""

    copies: bool  # whether a bucket is read from a copy in this process

    def begin(self) -> None:
        """Go back to the first bucket, at a sync's start."""
        ...

    def sent_bytes(self, num_bytes: int, difference: Mapping[str, int]) -> int:
        """Return how many bytes are sent for a bucket.

        num_bytes: size of the whole bucket.
        difference: {} if the bucket is sent whole.
        """
        ...

    def decode(self, tensors: list, difference: Mapping[str, int], sent: torch.Tensor) -> tuple[list, torch.Tensor]:
        """Return a bucket's tensors, as messages list them, and its bytes, which the caller must not change.

        sent: uint8, the bytes that arrived.

        Raises ValueError for a difference if no copy of the earlier bucket is held.
        """
        ...

    def end(self) -> None:
        """End a sync that succeeded."""
        ...


class WholeDecoder:
    """Reads buckets as they arrive. It is a ``BucketDecoder``."""

    copies = False

    def begin(self) -> None:
        """Do nothing: no bucket depends on an earlier one."""

    def sent_bytes(self, num_bytes: int, difference: Mapping[str, int]) -> int:
        return num_bytes

    def decode(self, tensors: list, difference: Mapping[str, int], sent: torch.Tensor) -> tuple[list, torch.Tensor]:
        return tensors, sent

    def end(self) -> None:
        """Do nothing: nothing is kept."""

"""The decoder of buckets in the engine's process: its interface, and the plain form for buckets that are sent whole.

A bucket is a batch of weight tensors, packed into one array of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch


class BucketDecoder(Protocol):
    """Turns the bytes that one trainer sends, in order, into buckets of weight tensors.

    copies: True if ``decode`` returns a copy of the bucket, which it keeps for the next sync, so that
        changes alone can be sent; False if it returns the bytes that arrived.
    """

    copies: bool

    def begin(self) -> None:
        """Start a sync: the next bucket is the first of the sync."""
        ...

    def sent_bytes(self, num_bytes: int, difference: Mapping[str, int]) -> int:
        """Return how many bytes are sent for a bucket.

        num_bytes: the size of the whole bucket.
        difference: the fields of the ``Difference`` (weights/delta.py) that is sent instead; {} if
            the bucket is sent whole.
        """
        ...

    def decode(self, tensors: list, difference: Mapping[str, int], sent: torch.Tensor) -> tuple[list, torch.Tensor]:
        """Return the whole bucket: descriptions of its tensors, and its bytes, which the caller must not change.

        tensors: [name, dtype, shape, first byte] of each tensor, as the message lists them.
        difference: the fields of the ``Difference`` that arrived; {} if the bucket is sent whole.
        sent: uint8, the bytes that arrived.

        Raises ValueError for a difference if no copy of the earlier bucket is held.
        """
        ...

    def end(self) -> None:
        """Finish a sync that succeeded. A decoder that keeps copies drops the copies of buckets not in this sync."""
        ...


class WholeDecoder:
    """Returns each bucket unchanged, since every bucket is sent whole. It is a ``BucketDecoder``."""

    copies = False

    def begin(self) -> None:
        """Do nothing: no bucket depends on an earlier one."""

    def sent_bytes(self, num_bytes: int, difference: Mapping[str, int]) -> int:
        return num_bytes

    def decode(self, tensors: list, difference: Mapping[str, int], sent: torch.Tensor) -> tuple[list, torch.Tensor]:
        return tensors, sent

    def end(self) -> None:
        """Do nothing: nothing is kept."""

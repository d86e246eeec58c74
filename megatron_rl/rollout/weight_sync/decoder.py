"""The decoder of a bucket, at the engine's end: its interface, and its plain form, which takes bytes as they arrive.

It lives in the engine's process, with the receiver.
"""

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
        """Return how many bytes travel. num_bytes: of the whole bucket. difference: {} if it comes whole."""
        ...

    def decode(self, tensors: list, difference: Mapping[str, int], sent: torch.Tensor) -> tuple[list, torch.Tensor]:
        """Return a bucket's tensors, as messages list them, and its bytes, which the caller may only read.

        sent: uint8, what arrived. Raises ValueError for a difference from a bucket that is not
            there.
        """
        ...

    def end(self) -> None:
        """End a sync that came through whole."""
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

"""Copies of a sync's buckets on the host: as the trainer last sent them, and as an engine last received them.

The trainer compares a bucket with its copy of the sync before, and sends the words that changed.
The engine writes these words into its own copy, which then equals the trainer's bucket to the bit.
It is digested, counted and loaded like a bucket that arrived whole. The copies have the size of the
weights, on every rank that sends and in every worker of an engine. Both sides import this module,
so it needs only torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_rl.weights.delta import Difference, apply, compare, difference_of, word_bytes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Holds the difference of a bucket from its copy of the sync before.

    num_words: words of its tensors, without padding.
    num_changed: the words among them that changed.
    difference, payload: None and an empty tensor if the bucket is nevertheless sent whole.
    """

    num_words: int
    num_changed: int
    difference: Difference | None
    payload: torch.Tensor


class HostCopies:
    """Keeps copies of buckets by their place in a sync. ``begin`` goes back to the first place."""

    def __init__(self) -> None:
        self._buckets: list[tuple[list, torch.Tensor]] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self._buckets)

    def begin(self) -> None:
        self._next = 0

    def end(self) -> None:
        """Forget the copies after the last bucket of the sync that ends."""
        del self._buckets[self._next :]

    def clear(self) -> None:
        self._buckets.clear()
        self._next = 0

    def compare(self, tensors: Sequence, packed: torch.Tensor) -> Compared | None:
        """Copy the next bucket; return its difference from the earlier copy. None if that had other tensors.

        tensors: [name, dtype, shape, first byte] of each tensor.
        packed: the bucket, uint8, on the trainer's device. The comparison runs there.
        """
        copy = self._next_copy()
        if copy is None or copy[0] != list(tensors):
            self.keep(tensors, packed)
            return None
        word_bytes = word_bytes_of([dtype for _, dtype, *_ in tensors])
        num_changed, encoded = compare(copy[1].to(packed.device, non_blocking=True), packed, word_bytes)
        if encoded is None:
            self.keep(tensors, packed)
        else:
            apply(copy[1], encoded[0], encoded[1].to("cpu"))
            self._next += 1
        difference, payload = encoded or (None, packed[:0])
        num_bytes = sum(math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape, *_ in tensors)
        return Compared(
            num_words=num_bytes // word_bytes, num_changed=num_changed, difference=difference, payload=payload
        )

    def keep(self, tensors: Sequence, packed: torch.Tensor) -> torch.Tensor:
        """Copy the next bucket; return the copy, uint8 on the host."""
        copy = self._next_copy()
        if copy is None:
            self._buckets.append((list(tensors), packed.to("cpu", copy=True)))
        elif copy[1].nbytes == packed.nbytes:
            copy[1].copy_(packed)
            self._buckets[self._next] = (list(tensors), copy[1])
        else:
            self._buckets[self._next] = (list(tensors), packed.to("cpu", copy=True))
        self._next += 1
        return self._buckets[self._next - 1][1]

    def patch(self, fields: Mapping[str, int], payload: torch.Tensor) -> tuple[list, torch.Tensor]:
        """Write a difference into the next copy; return its tensors and bytes, which the caller must not change.

        Raises ValueError if there is no copy, or if the difference does not fit it.
        """
        copy = self._next_copy()
        if copy is None:
            raise ValueError(
                f"the changes of bucket {self._next} arrived, and {len(self)} buckets are held here; the "
                "engine needs all of its weights"
            )
        apply(copy[1], difference_of(fields), payload.to("cpu"))
        self._next += 1
        return copy

    def _next_copy(self) -> tuple[list, torch.Tensor] | None:
        return self._buckets[self._next] if self._next < len(self._buckets) else None

"""Copies of a sync's buckets in host memory: as the trainer last sent them, and as an engine last received them.

The trainer compares a bucket with its copy from the previous sync, and sends the words that changed.
The engine writes these words into its own copy, which then equals the trainer's bucket to the bit.
The engine checks, counts and loads the copy like a bucket that arrived whole. The copies have the
size of the weights, on every rank that sends and in every worker of an engine. Both sides import
this module, so it needs only torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_rl.weights.delta import Difference, apply, compare, difference_of, word_bytes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Holds the difference between a bucket and the same bucket of the previous sync.

    num_words: the number of words (2 or 4 bytes) in the bucket's tensors, without padding.
    num_changed: the number of these words that changed.
    difference: how to read ``payload``; None if the bucket is to be sent whole, since a payload
        would be as large.
    payload: uint8, the encoded changed words (weights/delta.py); empty if ``difference`` is None.
    """

    num_words: int
    num_changed: int
    difference: Difference | None
    payload: torch.Tensor


class HostCopies:
    """Keeps a copy of each bucket of a sync, in the order in which the buckets are sent.

    ``compare``, ``keep`` and ``patch`` each take the next bucket in this order. ``begin`` returns
    to the first bucket.
    """

    def __init__(self) -> None:
        self._buckets: list[tuple[list, torch.Tensor]] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self._buckets)

    def begin(self) -> None:
        self._next = 0

    def end(self) -> None:
        """End a sync: drop the copies of buckets that were not in it."""
        del self._buckets[self._next :]

    def clear(self) -> None:
        self._buckets.clear()
        self._next = 0

    def compare(self, tensors: Sequence, packed: torch.Tensor) -> Compared | None:
        """Store a copy of the next bucket; return the bucket's difference from its copy of the previous sync.

        None if there was no such copy, or if that copy had other tensors.

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
        """Store a copy of the next bucket, ``packed``; return the copy, uint8 on the host.

        tensors: [name, dtype, shape, first byte] of each tensor.
        """
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
        """Write changed words (2 or 4 bytes each) into the copy of the sync's next bucket; return the copy.

        The copy is (tensors, bytes). Each tensor is described by [name, dtype, shape, first byte]. The
        caller must not change the bytes.

        fields: the fields of the ``Difference`` (weights/delta.py) that describes the payload.
        payload: uint8, the encoded changed words.

        Raises ValueError if there is no copy, or if the difference does not fit the copy.
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

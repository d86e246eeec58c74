"""The decoder of changed weights (``weight_sync.delta``): keeps a copy of each bucket, and writes changes into it.

A bucket is a batch of weight tensors, packed into one array of bytes. This module runs in the
engine's process. changed_encoder.py encodes the changes in the trainer's process.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_rl.rollout.weight_sync.host_copies import HostCopies
from megatron_rl.weights.delta import difference_of


class ChangedDecoder:
    """Keeps a host copy of each bucket (batch of tensors), and writes changed words into it. A ``BucketDecoder``."""

    copies = True

    def __init__(self) -> None:
        self._copies = HostCopies()

    def begin(self) -> None:
        self._copies.begin()

    def sent_bytes(self, num_bytes: int, difference: Mapping[str, int]) -> int:
        return difference_of(difference).num_bytes if difference else num_bytes

    def decode(self, tensors: list, difference: Mapping[str, int], sent: torch.Tensor) -> tuple[list, torch.Tensor]:
        if difference:
            return self._copies.patch(difference, sent)
        return tensors, self._copies.keep(tensors, sent)

    def end(self) -> None:
        self._copies.end()

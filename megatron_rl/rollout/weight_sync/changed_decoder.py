"""The decoder of changed weights (``weight_sync.delta``): keeps a copy of each bucket, and writes changes into it.

It runs in the engine's process, with the receiver. Its counterpart is changed_encoder.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_rl.rollout.weight_sync.host_copies import HostCopies
from megatron_rl.weights.delta import difference_of


class ChangedDecoder:
    """Keeps a copy of each bucket in host memory, and writes changed words into it. It is a ``BucketDecoder``."""

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

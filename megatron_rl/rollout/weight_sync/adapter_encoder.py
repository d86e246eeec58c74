"""The encoder for LoRA adapters that are sent apart from the frozen weights (``weight_sync.adapters=alone``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_rl.rollout.engines.replica import Replica, WeightReceipt
from megatron_rl.rollout.weight_sync.double_buffer import BucketBuffer
from megatron_rl.rollout.weight_sync.encoder import EncodedBucket, WholeEncoder
from megatron_rl.rollout.weight_sync.transport import is_adapter


class AdapterEncoder(WholeEncoder):
    """Sends every bucket (batch of tensors) whole, and remembers which replicas have the frozen weights.

    A sync brings the LoRA adapters alone, or adapters and all frozen weights. The end message of
    the sync holds the adapters' rank and alpha.
    """

    finishing = ("use_adapter",)

    def __init__(self, rank: int, alpha: float) -> None:
        self.adapter = {"rank": rank, "alpha": alpha}
        self._has_weights: set[int] = set()  # ids of the replicas that have all frozen weights
        self._had: set[int] = set()  # ids of the sync's replicas that had them at its start
        self._brought_weights = False

    def open(self, version: int, replicas: Sequence[Replica]) -> None:
        self._had = self._has_weights & {id(x) for x in replicas}
        self._has_weights -= self._had
        self._brought_weights = False

    def encode(self, buffer: BucketBuffer, living: Sequence[Replica]) -> EncodedBucket:
        self._brought_weights |= not all(is_adapter(name) for name, *_ in buffer.tensors)
        return super().encode(buffer, living)

    def end(self, living: Sequence[Replica]) -> Mapping[str, object]:
        return {"adapter": dict(self.adapter)}

    def took(self, replica: Replica, receipt: WeightReceipt) -> None:
        if self._brought_weights or id(replica) in self._had:
            self._has_weights.add(id(replica))

    def forget(self, replica: Replica) -> None:
        self._has_weights.discard(id(replica))

    def lacks_weights(self, replica: Replica) -> bool:
        """Return whether the replica lacks the frozen weights: it is new, was restarted, or failed in a sync."""
        return id(replica) not in self._has_weights

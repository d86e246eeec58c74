"""The sender's buffer for one bucket. Of two buffers, one is filled while the engines load the other one's bucket.

A bucket is a batch of weight tensors, packed into one array of bytes.
"""

from __future__ import annotations

from concurrent.futures import Future

import torch

from megatron_rl.rollout.engines.replica import Replica
from megatron_rl.rollout.weight_sync.mapped import Registration
from megatron_rl.rollout.weight_sync.transport import Segment, share_storage
from megatron_rl.weights.bucket_digest import NUM_PARTS, checksum_of, part_digests

ALIGNMENT = 16  # bytes; every dtype's view must start at a multiple of its size


class BucketBuffer:
    """Holds the packed tensors of one bucket, and makes the message by which an engine finds them.

    On a GPU the tensors are packed in the GPU's memory, and their digests are computed there. If
    the channel is shared memory, one copy then brings the bucket to the host.
    """

    def __init__(self, num_bytes: int, channel: str, device: torch.device) -> None:
        """Allocate shared memory if the channel needs it. Raises OSError if there is too little.

        num_bytes: the size of the buffer.
        channel: how the bytes reach engines: "shared_memory", "broadcast" or "cuda_ipc".
        device: where the tensors are packed.
        """
        self.channel, self.num_bytes, self._device = channel, num_bytes, device
        self.segment = Segment(num_bytes) if channel == "shared_memory" else None
        self._staged = self.segment is not None and device.type != "cpu"
        self._registration = Registration(self.segment.bytes) if self._staged and device.type == "cuda" else None
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.under_way: list[tuple[Replica, Future]] = []
        self._payload_segment: Segment | None = None
        self.clear()

    def clear(self) -> None:
        self.used, self.tensors = 0, []
        self._payload = torch.empty(0, dtype=torch.uint8)  # bytes on the device that are sent instead of the bucket

    @property
    def packed(self) -> torch.Tensor:
        """Return the bucket's bytes, uint8. The next bucket overwrites this memory."""
        return self.bytes[: self.used]

    def fits(self, tensor: torch.Tensor) -> bool:
        return self.used + room_of(tensor) <= self.num_bytes

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if not len(self.bytes):
            host = self.segment is not None and not self._staged
            self.bytes = self.segment.bytes if host else memory_on(self._device, self.num_bytes)
        end = self.used + tensor.numel() * tensor.element_size()
        self.bytes[self.used : end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self.tensors.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self.used])
        self.used += room_of(tensor)
        if end < self.used:
            self.bytes[end : self.used].zero_()  # so that equal weights have equal checksums

    def message(self, *, whole: bool = True) -> dict[str, object]:
        """Make the bucket's bytes readable for an engine, if ``whole``; return the message that describes the bucket.

        whole: True if any engine reads all of the bucket's bytes. False if every engine reads only
            the changed words, which ``share`` makes readable.
        """
        seen = part_digests(self.packed, range(NUM_PARTS))
        if self._staged and whole:
            self.segment.bytes[: self.used].copy_(self.packed, non_blocking=True)
        digests = seen.tolist()  # waits for the device, and so for the copy
        content = {
            "kind": "bucket",
            "tensors": self.tensors,
            "num_bytes": self.used,
            "digests": digests,
            "checksum": checksum_of(self.tensors, self.used, digests),
        }
        if self.segment:
            return {**content, "segment": str(self.segment.path)}
        return {**content, "storage": share_storage(self.bytes)} if self.channel == "cuda_ipc" else content

    def share(self, payload: torch.Tensor) -> dict[str, object]:
        """Make a payload readable for an engine; return the message's fields that locate the payload.

        payload: an encoding of the bucket's words (2 or 4 bytes each) that changed since the
            previous sync. It is sent instead of the bucket. uint8 on the buffer's device, kept until
            ``clear``.

        Raises OSError if there is too little shared memory.
        """
        self._payload = payload
        if self.segment:
            if self._payload_segment is None or len(self._payload_segment.bytes) < len(payload):
                if self._payload_segment is not None:
                    self._payload_segment.close()
                self._payload_segment = Segment(2 * len(payload) + ALIGNMENT)
            self._payload_segment.bytes[: len(payload)].copy_(payload)
            return {"segment": str(self._payload_segment.path)}
        if self.channel == "cuda_ipc" and len(payload):
            return {"storage": share_storage(payload)}
        return {}

    def free_device(self) -> None:
        """Free the buffer's device memory. Keep shared memory, since allocating pages takes longer than a copy."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._payload = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        self.free_device()
        if self._registration:
            self._registration.release()
        for segment in (self.segment, self._payload_segment):
            if segment is not None:
                segment.close()


def room_of(tensor: torch.Tensor) -> int:
    """Return the number of bytes that a tensor takes in a bucket, its alignment included."""
    return max(1, -(-tensor.numel() * tensor.element_size() // ALIGNMENT)) * ALIGNMENT


def memory_on(device: torch.device, num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)

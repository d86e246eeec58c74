"""The release of device memory of gradients and optimizer state, while an inference engine needs the memory.

``untyped_storage().resize_(0)`` releases a storage, and ``resize_`` to its old size brings it back.
The tensors stay the same objects, and so do all views that Megatron-Core keeps of them
(``main_grad``, buckets, ``main_param``, the shards of AdamW's groups). Megatron-Core 0.16.1 does
the same to its gradient buffers (``distributed/param_and_grad_buffer.py`` offload_to_cpu). A tensor
whose storage is released must not be read: it has no memory, and torch raises no error.

On a CPU host the same storages are released and filled again. On an H100 the state came back to the
bit (docs/evidence/support-matrix.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from megatron_rl.distributed.platform import HOST

HOST_BLOCK_BYTES = 2**26  # torch rounds a pinned allocation up to a power of two (2.13, CachingHostAllocator)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedBytes:
    """Holds the numbers of bytes that were freed on this rank's device.

    A storage that several tensors share counts once.

    gradients, optimizer: the bytes of gradients, and of the optimizer's state.
    """

    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.gradients + self.optimizer


class HostBlocks:
    """Holds host memory as one range of bytes, made of blocks that are allocated once and kept.

    On a CUDA host the blocks are pinned.
    """

    def __init__(self, block_bytes: int = HOST_BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self.blocks: list[torch.Tensor] = []

    def reserve(self, num_bytes: int) -> None:
        """Allocate blocks until they hold ``num_bytes`` in all. Raises MemoryError if the host has less."""
        while len(self.blocks) * self.block_bytes < num_bytes:
            try:
                block = torch.empty(self.block_bytes, dtype=torch.uint8, device="cpu", pin_memory=HOST.is_cuda)
            except RuntimeError as error:  # torch's own message would say that CUDA is out of memory
                raise MemoryError(
                    f"offload() puts {num_bytes:,} bytes of this rank's optimizer state in "
                    f"{'pinned ' if HOST.is_cuda else ''}host memory, and the host gave "
                    f"{len(self.blocks) * self.block_bytes:,}; give the job more memory to lock, or spread the state "
                    "over data-parallel ranks with optimizer.distributed=true"
                ) from error
            self.blocks.append(block)

    def spans(self, start: int, num_bytes: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield (slice, bytes) for each block that holds some of the bytes from ``start`` to ``start + num_bytes``.

        The bytes are a view of the block. The slice says which of the ``num_bytes`` bytes they are,
        counted from ``start``.
        """
        done = 0
        while done < num_bytes:
            block, offset = divmod(start + done, self.block_bytes)
            taken = min(num_bytes - done, self.block_bytes - offset)
            yield slice(done, done + taken), self.blocks[block][offset : offset + taken]
            done += taken


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Moved:
    storage: torch.UntypedStorage
    num_bytes: int
    start: int  # the first byte's address in the host's blocks


class Offload:
    """Releases tensors' device memory and keeps their contents on the host. No method is a collective.

    block_bytes: the size of each block of host memory (``HostBlocks``).
    """

    def __init__(self, *, block_bytes: int = HOST_BLOCK_BYTES) -> None:
        self.host = HostBlocks(block_bytes)
        self.released: OffloadedBytes | None = None  # None while everything is on the device
        self._zeroed: list[tuple[torch.UntypedStorage, int]] = []
        self._moved: list[_Moved] = []

    def release(
        self, *, zeros: Iterable[torch.Tensor], state: Iterable[torch.Tensor], staying: Iterable[torch.Tensor]
    ) -> OffloadedBytes:
        """Release the device memory of tensors, and return the freed bytes; do nothing if it is released already.

        zeros: tensors that hold only zeros, which are not copied.
        state: tensors whose contents move to the host.
        staying: tensors whose storages stay, even if they also hold tensors of ``zeros`` or
            ``state``.
        """
        if self.released is not None:
            return self.released
        addresses = {tensor.untyped_storage().data_ptr() for tensor in staying}
        zeroed = _storages(zeros, addresses)
        moved, end = [], 0
        for storage in _storages(state, addresses):
            moved.append(_Moved(storage=storage, num_bytes=storage.nbytes(), start=end))
            end += storage.nbytes()
        self.host.reserve(end)
        for move in moved:
            on_device = _bytes_of(move.storage)
            for span, piece in self.host.spans(move.start, move.num_bytes):
                piece.copy_(on_device[span], non_blocking=True)
        HOST.synchronize()
        self._moved, self._zeroed = moved, [(storage, storage.nbytes()) for storage in zeroed]
        self.released = OffloadedBytes(gradients=sum(size for _, size in self._zeroed), optimizer=end)
        for storage in [*zeroed, *(move.storage for move in moved)]:
            storage.resize_(0)
        if HOST.is_cuda:
            torch.cuda.empty_cache()  # until then torch keeps the freed memory for itself
        return self.released

    def restore(self) -> None:
        """Give the released tensors their device memory and contents back.

        If the device runs out of memory meanwhile, a later call does the rest.
        """
        while self._moved:
            move = self._moved[-1]
            move.storage.resize_(move.num_bytes)
            on_device = _bytes_of(move.storage)
            for span, piece in self.host.spans(move.start, move.num_bytes):
                on_device[span].copy_(piece, non_blocking=True)
            self._moved.pop()
        while self._zeroed:
            storage, num_bytes = self._zeroed[-1]
            storage.resize_(num_bytes)
            _bytes_of(storage).zero_()
            self._zeroed.pop()
        HOST.synchronize()
        self.released = None


def _storages(tensors: Iterable[torch.Tensor], staying: set[int]) -> list[torch.UntypedStorage]:
    """Return the storages of the tensors on the device, each once, in order.

    Scalars are left out: they are AdamW's step counts, which the host reads.

    staying: addresses of storages that are left out.
    """
    by_address = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if (
            tensor.device.type == HOST.device_type
            and tensor.dim()
            and storage.nbytes()
            and storage.data_ptr() not in staying
        ):
            by_address.setdefault(storage.data_ptr(), storage)
    return list(by_address.values())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

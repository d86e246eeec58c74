"""Transport of a bucket's bytes from the trainer to an engine: shared memory, a broadcast, or the trainer's GPU memory.

Shared memory is a file, called a segment, that both processes map. The broadcast has its own
process group. The engine can also open the trainer's GPU memory. Both sides import this module, so
it needs only torch.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import mmap
import os
import pathlib
import secrets
import socket
import tempfile
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

SEGMENT_PREFIX = "megatron_rl-weights-"


def segment_folders() -> tuple[pathlib.Path, ...]:
    """Return the folders for shared memory, the preferred first: /dev/shm if it exists, then the temporary folder."""
    shared = pathlib.Path("/dev/shm")
    temporary = pathlib.Path(tempfile.gettempdir())
    return (shared, temporary) if shared.is_dir() else (temporary,)


class Segment:
    """Holds a file of shared memory. The engine, run by the same user, opens it by its path. ``close`` removes it."""

    def __init__(self, num_bytes: int) -> None:
        """Create the file and allocate all of it. Raises OSError if memory is too small.

        Without the allocation, a later write beyond the memory would end the process by a bus
        error.
        """
        folder, name = segment_folders()[0], f"{SEGMENT_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        remove_abandoned(folder)
        draft, self.path = folder / f".{name}", folder / name
        self._file = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)  # before the rename; ends when the file is closed or the owner killed
        draft.rename(self.path)
        try:
            os.posix_fallocate(self._file, 0, num_bytes)
            self.bytes = torch.frombuffer(mmap.mmap(self._file, num_bytes), dtype=torch.uint8)
        except OSError as error:
            self.close()
            raise OSError(
                error.errno,
                f"{num_bytes:,} bytes of shared memory in {self.path.parent}: {error.strerror}; lower "
                "weight_sync.bucket_mb, enlarge it (docker: --shm-size), or use weight_sync.channel=broadcast",
            ) from error

    def close(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.path.unlink(missing_ok=True)
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def remove_abandoned(folder: pathlib.Path) -> None:
    """Remove the segments in ``folder`` whose creator was killed: a running process holds its segments' locks."""
    for path in folder.glob(f"{SEGMENT_PREFIX}*"):
        # The file may be gone, belong to another user, or be in use.
        with contextlib.suppress(FileNotFoundError, PermissionError, BlockingIOError):
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(file)


def share_storage(packed: torch.Tensor) -> dict[str, object]:
    """Return, as JSON-able values, the handles by which another process on this host opens ``packed``'s GPU memory.

    CUDA's handles are bytes, sent as base64, and nothing is pickled. Each call makes a new export
    of the memory, which ends when the other process frees the tensor that it opened
    (torch/multiprocessing/reductions.py, 2.13). This was run on an H100
    (docs/evidence/support-matrix.md).
    """
    _, handle, num_bytes, offset, counter, counter_offset, event, waits = packed.untyped_storage()._share_cuda_()
    plain = {"num_bytes": num_bytes, "offset": offset, "counter_offset": counter_offset, "waits": waits}
    secret = {"handle": handle, "counter": counter, "event": event}
    return plain | {name: base64.b64encode(value).decode() for name, value in secret.items()}


def open_storage(shared: dict, device_index: int) -> torch.Tensor:
    """Return the GPU memory that ``share_storage`` exported, as a uint8 tensor on this process's GPU ``device_index``.

    shared: the dict that ``share_storage`` returned.
    """
    handle, counter, event = (base64.b64decode(shared[name]) for name in ("handle", "counter", "event"))
    storage = torch.UntypedStorage._new_shared_cuda(
        device_index,
        handle,
        shared["num_bytes"],
        shared["offset"],
        counter,
        shared["counter_offset"],
        event,
        shared["waits"],
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def view_of(packed: torch.Tensor, dtype: str, shape: Sequence[int], start: int) -> torch.Tensor:
    """Return the tensor that begins at byte ``start`` of a bucket, without a copy.

    packed: uint8, the bucket's bytes.
    dtype: the tensor's dtype by its name in torch, such as "bfloat16".
    """
    kind, size = getattr(torch, dtype), torch.Size(shape)
    return packed[start : start + size.numel() * kind.itemsize].view(kind).view(size)


def is_adapter(name: str) -> bool:
    """Return whether a tensor's name, in PEFT's form, is that of a LoRA matrix A or B, not of a model weight."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


class Tally:
    """Counts the tensors of a sync, and combines the checksums of its buckets, in order, into one checksum."""

    def __init__(self) -> None:
        self.count = 0
        self._digest = hashlib.sha256()

    def add(self, checksum: str, num_tensors: int) -> None:
        self.count += num_tensors
        self._digest.update(f"{checksum}/{num_tensors};".encode())

    def value(self) -> str:
        return self._digest.hexdigest()[:32]


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of ``address`` alone; torch's store would listen on all addresses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen()
    return listener


def open_group(listener: socket.socket, world_size: int, backend: str, timeout: timedelta):
    """Open a process group as rank 0 (the trainer); return it once every worker of the engines has joined.

    world_size: the engines' workers, plus 1 for the trainer.
    """
    host, port = listener.getsockname()[:2]
    store = dist.TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return _group(store, host, 0, world_size, backend, timeout)


def join_group(address: str, port: int, rank: int, world_size: int, backend: str, timeout: timedelta):
    """Join the trainer's process group as rank ``rank``, from an engine's worker; return the group.

    address, port: where the trainer listens.
    """
    store = dist.TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    with socket.create_connection((address, port), timeout=timeout.total_seconds()) as probe:
        own_address = probe.getsockname()[0]  # the address of the interface that leads to the trainer
    return _group(store, own_address, rank, world_size, backend, timeout)


def _group(store, own_address: str, rank: int, world_size: int, backend: str, timeout: timedelta):
    """Return a process group that is separate from torch's global groups, which vLLM and the trainer each use.

    own_address: where gloo listens.
    """
    store = dist.PrefixStore("megatron_rl/weights", store)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def broadcast(group, packed: torch.Tensor) -> None:
    """Broadcast rank 0's ``packed`` into the ``packed`` of the other ranks, and wait until it has arrived."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([packed], options).wait()


def receive(group, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return the bytes that rank 0 broadcasts, uint8 [num_bytes] on ``device``. For 0 bytes nothing is broadcast."""
    packed = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    if num_bytes:
        broadcast(group, packed)
    return packed

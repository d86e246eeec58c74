"""Transport of a bucket's bytes from the trainer to an engine: shared memory, a broadcast, or the trainer's GPU memory.

Shared memory is a file that both map, the broadcast has a process group of its own, and the engine
opens the trainer's GPU memory. Both sides import this, so it needs torch alone.
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
    """Return the folders for segments, the preferred one first: /dev/shm if the host has it, then temporary files."""
    shared = pathlib.Path("/dev/shm")
    temporary = pathlib.Path(tempfile.gettempdir())
    return (shared, temporary) if shared.is_dir() else (temporary,)


class Segment:
    """Holds a file that this process maps and the engine, of the same user, opens by its path; ``close`` removes it."""

    def __init__(self, num_bytes: int) -> None:
        """Allocate the file; raise OSError where memory is short, as a later write would end in a bus error."""
        folder, name = segment_folders()[0], f"{SEGMENT_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        remove_abandoned(folder)
        draft, self.path = folder / f".{name}", folder / name
        self._file = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)  # before it has its name; ends when it is closed or its owner killed
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
    """Remove segments whose owner was killed: nobody holds their lock any more."""
    for path in folder.glob(f"{SEGMENT_PREFIX}*"):
        # gone meanwhile, another user's, in use
        with contextlib.suppress(FileNotFoundError, PermissionError, BlockingIOError):
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(file)


def share_storage(packed: torch.Tensor) -> dict[str, object]:
    """Return, as JSON, the handles by which another process on this host opens ``packed``'s GPU memory.

    CUDA's handles are bytes, sent as base64; nothing is pickled. Each call is an export of its own,
    which that process releases with its tensor (torch/multiprocessing/reductions.py, 2.13). Ran on
    an H100.
    """
    _, handle, num_bytes, offset, counter, counter_offset, event, waits = packed.untyped_storage()._share_cuda_()
    plain = {"num_bytes": num_bytes, "offset": offset, "counter_offset": counter_offset, "waits": waits}
    secret = {"handle": handle, "counter": counter, "event": event}
    return plain | {name: base64.b64encode(value).decode() for name, value in secret.items()}


def open_storage(shared: dict, device_index: int) -> torch.Tensor:
    """Return the memory as uint8, on this process's GPU ``device_index``. NOT RUN, as ``share_storage``."""
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
    """Return the tensor that a bucket holds from byte ``start`` on, without a copy.

    dtype: its name in torch, as messages have it.
    """
    kind, size = getattr(torch, dtype), torch.Size(shape)
    return packed[start : start + size.numel() * kind.itemsize].view(kind).view(size)


def is_adapter(name: str) -> bool:
    """Tell whether a tensor is half of an adapter's pair, by its name (PEFT's), and not a weight of the model."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


class Tally:
    """Counts a sync's tensors, and digests the checksums of its buckets, in order, into one text."""

    def __init__(self) -> None:
        self.count = 0
        self._digest = hashlib.sha256()

    def add(self, checksum: str, num_tensors: int) -> None:
        self.count += num_tensors
        self._digest.update(f"{checksum}/{num_tensors};".encode())

    def value(self) -> str:
        return self._digest.hexdigest()[:32]


def listen(address: str) -> socket.socket:
    """Return a listening socket on a free port of this address alone; torch's store would listen on all addresses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen()
    return listener


def open_group(listener: socket.socket, world_size: int, backend: str, timeout: timedelta):
    """Return the trainer's end of a process group, rank 0, once every worker of the engine has joined."""
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
    """Return an engine worker's end of the process group."""
    store = dist.TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    with socket.create_connection((address, port), timeout=timeout.total_seconds()) as probe:
        own_address = probe.getsockname()[0]  # of the interface that leads to the trainer
    return _group(store, own_address, rank, world_size, backend, timeout)


def _group(store, own_address: str, rank: int, world_size: int, backend: str, timeout: timedelta):
    """Return a process group apart from torch's global ones, which vLLM and the trainer each have for themselves."""
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
    """Broadcast rank 0's ``packed`` into that of the other ranks, and wait."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([packed], options).wait()


def receive(group, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return the bytes that rank 0 broadcasts; it broadcasts nothing where there are none."""
    packed = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    if num_bytes:
        broadcast(group, packed)
    return packed

"""Host memory that sender and engine share: its registration with CUDA, and the engine's mapping of it.

Without the registration, copies between the memory and a GPU go through a buffer of the driver,
while the host waits. Both sides import this module, so it needs only torch.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import pathlib

import torch

from megatron_rl.rollout.weight_sync.transport import SEGMENT_PREFIX, segment_folders

log = logging.getLogger(__name__)
PORTABLE = 1  # cudaHostRegisterPortable: for all CUDA contexts of the process
_warned: set[str] = set()


class Registration:
    """Registers mapped memory with CUDA until ``release``. If CUDA refuses, log a warning; copies are then slower."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._address = 0
        if not len(memory):
            return
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE))
        if code == 0:
            self._address = memory.data_ptr()
            return
        _forget_last_error()
        _warn_once(f"CUDA does not register shared memory (cudaHostRegister: error {code}); weights are copied slower")

    def release(self) -> None:
        """Unregister the memory. Call it before the memory is unmapped, while no copy is under way."""
        address, self._address = self._address, 0
        if address and (code := int(torch.cuda.cudart().cudaHostUnregister(address))):
            _forget_last_error()
            _warn_once(f"CUDA did not unregister shared memory that is released (cudaHostUnregister: error {code})")


def _forget_last_error() -> None:
    """Clear CUDA's stored error, so that no later kernel raises it.

    For this a kernel is launched, and the error that it raises is ignored.
    """
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        log.warning(message)


class MappedSegments:
    """Maps the sender's files of shared memory (segments) into this process, each only once until ``release``."""

    def __init__(self, device: torch.device) -> None:
        """Map nothing yet. ``device``: where the bytes are copied; for a GPU, mapped memory is registered with CUDA."""
        self._on_gpu = device.type == "cuda"
        self._maps: dict[str, torch.Tensor] = {}
        self._registrations: list[Registration] = []

    def bytes_of(self, path: str) -> torch.Tensor:
        """Return the bytes (uint8) of the sender's file of shared memory at ``path``.

        Raises ValueError if ``path`` is no such file, or if this process cannot open it.
        """
        if path not in self._maps:
            self._maps[path] = _mapped(pathlib.Path(path))
            if self._on_gpu:
                self._registrations.append(Registration(self._maps[path]))
        return self._maps[path]

    def release(self) -> None:
        for registration in self._registrations:
            registration.release()
        self._registrations.clear()
        self._maps.clear()


def _mapped(path: pathlib.Path) -> torch.Tensor:
    if path.parent not in segment_folders() or not path.name.startswith(SEGMENT_PREFIX):
        raise ValueError(
            f"{path} is not a weight segment: {SEGMENT_PREFIX}* in one of {[str(x) for x in segment_folders()]}"
        )
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)  # torch needs writable memory, even for reading
    except OSError as error:
        raise ValueError(
            f"the trainer's segment {path} cannot be opened here ({error.strerror}); an engine on another host or "
            "in a container without the host's /dev/shm needs weight_sync.channel=broadcast"
        ) from error
    try:
        return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
    finally:
        os.close(file)

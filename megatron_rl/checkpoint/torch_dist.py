"""The files of a ``torch_dist`` checkpoint, read and written a tensor at a time by one process without a process group.

The format is torch.distributed.checkpoint's (torch 2.13 ``filesystem.py``). A ``*.distcp`` file
holds chunks of tensors, each written by ``torch.save``, one after the other. A pickled ``Metadata``
in ``.metadata`` holds each tensor's size and chunks, and each chunk's file and offset.
Megatron-Core (0.16.1 and 0.19.2 ``dist_checkpointing``) adds ``metadata.json`` and ``common.pt``, the
state saved once for all ranks. 0.19.2 keeps this common state as an object
``common_state/shard_0_1`` instead, and reads both.

torch's own writer is not used: it holds every tensor of a file until the file is complete (2.13
``_write_files_from_queue``). Only ``.metadata`` is unpickled, and only the classes that
checkpoint/pickled.py lists.
"""

from __future__ import annotations

import json
import math
import pathlib
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_rl.checkpoint.folder import DamagedCheckpoint
from megatron_rl.checkpoint.pickled import COMMON, FORMAT, METADATA, load_plain, read_backend, read_index
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.storage.remote import Window

if TYPE_CHECKING:
    from megatron_rl.storage.remote import RemotePath

COMMON_OBJECT = "common_state/shard_0_1"


class _Chunk(Window):
    """Presents the ``length`` bytes of a file from ``offset`` on as a seekable file, for torch.load."""

    def __init__(self, file: BinaryIO, offset: int, length: int):
        super().__init__(length)
        self.file, self.offset = file, offset

    def readinto(self, buffer) -> int:
        self.file.seek(self.offset + self.position)
        view = memoryview(buffer)[: max(0, self.length - self.position)]
        count = self.file.readinto(view)
        self.position += count
        return count


class TorchDistReader:
    """Reads tensors of a torch_dist folder by key; it reads only the chunks that a tensor touches.

    Raises ConfigError if the folder is no such checkpoint. Raises DamagedCheckpoint if a file is
    missing, cut short or replaced, or if a pickle names a class that is not allowed.
    """

    def __init__(self, folder: pathlib.Path | RemotePath):
        self.folder = folder
        for name in (FORMAT, METADATA):
            if not (folder / name).exists():
                raise ConfigError(
                    f"{folder} has no {name}: it is no complete torch_dist checkpoint; name a folder that has one"
                )
        self.backend = read_backend(folder)
        if self.backend != "torch_dist":
            raise ConfigError(
                f"{folder} was saved with sharded_backend={quoted(self.backend)}; only torch_dist is read: save it "
                "with that"
            )
        metadata = read_index(folder)
        entries = metadata.state_dict_metadata
        self.tensors: dict[str, TensorStorageMetadata] = {
            k: v for k, v in entries.items() if isinstance(v, TensorStorageMetadata)
        }
        self.objects = sorted(k for k, v in entries.items() if isinstance(v, BytesStorageMetadata))
        self._places = {(x.fqn, x.offset and tuple(x.offset)): storage for x, storage in metadata.storage_data.items()}
        self._file: tuple[str, BinaryIO] | None = None

    def close(self) -> None:
        if self._file is not None:
            self._file[1].close()
            self._file = None

    def _stored(self, key: str, offset: tuple[int, ...] | None) -> object:
        """Return one object that torch.save wrote into the folder's files.

        offset: a chunk's first indices in the tensor ``key``; None if ``key`` names an object that
            is not a tensor.
        """
        storage = self._places.get((key, offset))
        if storage is None:
            raise DamagedCheckpoint(f"{self.folder / METADATA} does not say where {key} at {offset} lies")
        if vars(storage).get("transform_descriptors"):
            raise ConfigError(
                f"{key} in {self.folder} is stored through {storage.transform_descriptors}, which is not read; save it "
                "without"
            )
        if self._file is None or self._file[0] != storage.relative_path:
            self.close()
            path = self.folder / storage.relative_path
            unbuffered = {"buffering": 0} if isinstance(path, pathlib.Path) else {}
            self._file = (storage.relative_path, path.open("rb", **unbuffered))
        where = f"{key} in {self.folder / storage.relative_path}"
        return load_plain(_Chunk(self._file[1], storage.offset, storage.length), where)

    def _chunk(self, key: str, start: tuple[int, ...], extent: tuple[int, ...]) -> torch.Tensor:
        try:
            chunk = self._stored(key, start)
        except pickle.UnpicklingError as error:
            raise DamagedCheckpoint(f"{key} in {self.folder} holds no tensor that weights_only reads") from error
        if not isinstance(chunk, torch.Tensor) or (tuple(chunk.shape), chunk.dtype) != (extent, self.dtype(key)):
            found = f"{chunk.dtype} {list(chunk.shape)}" if isinstance(chunk, torch.Tensor) else type(chunk).__name__
            raise DamagedCheckpoint(
                f"{key} in {self.folder} is {found} where {METADATA} says {self.dtype(key)} {list(extent)}: a file was "
                "changed"
            )
        return chunk

    def size(self, key: str) -> tuple[int, ...]:
        return tuple(self.tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        return self.tensors[key].properties.dtype

    def read(self, key: str, lead: tuple[int, ...] = ()) -> torch.Tensor:
        """Return the tensor ``key``, or its part ``tensor[lead]``, joined from its chunks.

        lead: the first indices in a stacked tensor, such as (layer, expert); () reads it whole.

        The call takes the memory of the result and one chunk. Raises ConfigError if the chunks do
        not cover the result.
        """
        size = self.size(key)[len(lead) :]
        tensor, covered = torch.empty(size, dtype=self.dtype(key)), 0
        for chunk in self.tensors[key].chunks:
            start, extent = tuple(chunk.offsets), tuple(chunk.sizes)
            if any(not o <= i < o + s for i, o, s in zip(lead, start, extent, strict=False)):
                continue
            part = self._chunk(key, start, extent)[tuple(i - o for i, o in zip(lead, start, strict=False))]
            if tuple(part.shape) == size:
                return part
            inner = tuple(slice(o, o + s) for o, s in zip(start[len(lead) :], extent[len(lead) :], strict=True))
            tensor[inner] = part
            covered += part.numel()
        if covered != math.prod(size):
            raise ConfigError(
                f"the chunks of {key}{list(lead)} in {self.folder} hold {covered} of {math.prod(size)} elements: it "
                "is damaged"
            )
        return tensor

    def common(self) -> Mapping[str, object]:
        """Return the state that is saved once for all ranks; {} if absent.

        It is loaded with ``weights_only``, which allows numbers, text, tensors and containers.
        Raises DamagedCheckpoint if it is no mapping.
        """
        if (self.folder / COMMON).exists():
            state, where = load_plain(self.folder / COMMON), self.folder / COMMON
        elif COMMON_OBJECT in self.objects:
            state, where = self._stored(COMMON_OBJECT, None), f"{COMMON_OBJECT} in {self.folder}"
            state = state[0] if isinstance(state, list) and state else state
        else:
            return {}
        if not isinstance(state, Mapping):
            raise DamagedCheckpoint(f"{where} holds a {type(state).__name__} in place of the common state")
        return state


class TorchDistWriter:
    """Writes a torch_dist folder a chunk at a time. A chunk is a rectangular piece of a tensor.

    When ``add_chunk`` returns, the chunk is in its file. Each call states the whole tensor's size, so
    tensors need not be declared first. ``finish`` completes the checkpoint.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._files: dict[int, BinaryIO] = {}
        self.bytes_written = 0

    def _append(self, rank: int, value: object) -> _StorageInfo:
        name = f"__{rank}_0.distcp"
        if rank not in self._files:
            self._files[rank] = (self.folder / name).open("wb")
        file = self._files[rank]
        start = file.tell()
        torch.save(value, file)
        self.bytes_written += file.tell() - start
        return _StorageInfo(relative_path=name, offset=start, length=file.tell() - start)

    def add_chunk(
        self, rank: int, keys: Sequence[str], size: tuple[int, ...], offsets: tuple[int, ...], chunk: torch.Tensor
    ) -> None:
        """Write a chunk of the tensor ``keys[0]`` into a file. Raises ConfigError if its chunks differ in dtype.

        rank: the number of the file.
        keys: the tensor's key, and further keys under which the same bytes are found.
        size: the whole tensor's shape.
        offsets: the indices of the chunk's first element in the whole tensor.
        chunk: a tensor with as many dimensions as the whole tensor.
        """
        chunk = chunk.contiguous()
        if chunk.untyped_storage().nbytes() != chunk.nbytes:
            chunk = chunk.clone()  # torch.save writes a view's whole storage
        for key in keys:
            known = self._entries.setdefault(
                key,
                TensorStorageMetadata(properties=TensorProperties(dtype=chunk.dtype), size=torch.Size(size), chunks=[]),
            )
            if known.properties.dtype != chunk.dtype:
                raise ConfigError(
                    f"{key} is {known.properties.dtype} in one layer and {chunk.dtype} in another, and "
                    "Megatron-Core's checkpoint holds all layers as one tensor; choose one with --dtype"
                )
            known.chunks.append(ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=chunk.shape))
        storage = self._append(rank, chunk)
        for key in keys:
            self._places[MetadataIndex(key, offsets)] = storage

    def add_objects(self, keys: Sequence[str], value: object) -> None:
        """Write one object, of types that ``weights_only`` reads, under each of ``keys``."""
        storage = self._append(0, value)
        for key in keys:
            self._entries[key] = BytesStorageMetadata()
            self._places[MetadataIndex(key)] = storage

    def finish(self, common: Mapping[str, object]) -> None:
        for file in self._files.values():
            file.close()
        torch.save(dict(common), self.folder / COMMON)
        with (self.folder / METADATA).open("wb") as file:
            pickle.dump(Metadata(state_dict_metadata=self._entries, storage_data=self._places), file)
        backends = {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        (self.folder / FORMAT).write_text(json.dumps(backends))

    def abandon(self) -> None:
        """Close the files of a checkpoint that will not be finished."""
        for file in self._files.values():
            file.close()

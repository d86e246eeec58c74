"""The writing of safetensors files one tensor at a time, sharded with an index as ``save_pretrained`` does it.

The format (safetensors 0.4 and later): 8 bytes little-endian with the header's length, a JSON
header with dtype, shape and offsets of each tensor, then the tensors' bytes. All names, shapes and
dtypes follow from the config, so the header is written first and the tensors follow. safetensors'
own ``save_file`` needs all tensors of a file at once.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

import torch

from megatron_rl.errors import ConfigError

if TYPE_CHECKING:
    from megatron_rl.storage.remote import RemotePath

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Describes a tensor to write to a file, and under which names the writer is given its content.

    Example: ``Planned(name="norm.weight", shape=(64,), dtype=torch.bfloat16)`` has 128 bytes.

    slices: the names under which the writer gets the tensor's slices along the first dimension, or
        equal ranges of rows of each slice, in order; () if it gets the whole tensor under ``name``.
    parts: 0 if each slice comes as one tensor. Otherwise each slice comes as ``parts`` tensors,
        equal ranges of its columns. Each range is transposed, and has its own name in ``slices``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slices: tuple[str, ...] = ()
    parts: int = 0

    @property
    def arrivals(self) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
        """Return (name, shape, dtype) of each tensor that the writer gets.

        It gets one tensor for each name in ``slices``, or this tensor whole if ``slices`` is ().
        """
        if not self.slices:
            return ((self.name, self.shape, self.dtype),)
        rows = self.shape[0] * self.shape[1] // len(self.slices)
        size = (self.shape[2] // self.parts, self.shape[1]) if self.parts else (rows, *self.shape[2:])
        return tuple((name, size, self.dtype) for name in self.slices)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class FileWriter:
    """Writes tensors one after the other into safetensors files, in the order that ``files`` gives.

    folder: where the files are written, on a disk or in an object store (a RemotePath).
    files: (file name, tensors of that file) for each file. A file is opened when its first tensor
        comes, and its header is written first.

    Raises ConfigError for a dtype other than float32, bfloat16 and float16.
    """

    def __init__(self, folder: pathlib.Path | RemotePath, files: Sequence[tuple[str, Sequence[Planned]]]):
        self.folder, self._files = folder, files
        for tensor in (tensor for _, tensors in files for tensor in tensors):
            if tensor.dtype not in DTYPE_NAMES:
                raise ConfigError(
                    f"{tensor.name} is {tensor.dtype}; only {', '.join(map(str, DTYPE_NAMES))} are written: choose one "
                    "with --dtype"
                )
        self._waiting = [
            (number, arrival, tensor.parts)
            for number, (_, tensors) in enumerate(files)
            for tensor in tensors
            for arrival in tensor.arrivals
        ]
        self._waiting.reverse()
        self._parts: list[torch.Tensor] = []  # parts of a slice that is not complete yet
        self._open: tuple[int, BinaryIO] | None = None

    def _start(self, number: int) -> BinaryIO:
        if self._open is not None:
            if self._open[0] == number:
                return self._open[1]
            self._open[1].close()
        name, tensors = self._files[number]
        file = (self.folder / name).open("wb")
        self._open = (number, file)
        file.write(header_of(tensors))
        return file

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next planned tensor, which must be in host memory.

        Raises OSError if the disk or store does not take it.
        """
        number, planned, parts = self._waiting.pop()
        arrived = (name, tuple(tensor.shape), tensor.dtype)
        assert arrived == planned, f"{arrived} came where {planned} was planned"
        if parts:
            self._parts.append(tensor.t().contiguous())
            if len(self._parts) < parts:
                return
            tensor, self._parts = torch.cat(self._parts, dim=1), []
        self._start(number).write(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))

    def finish(self) -> None:
        """Close the last file; all planned tensors must have been added."""
        waiting = self._waiting
        assert not waiting, f"{len(waiting)} planned tensors never came, {waiting[-1][1]} is the first"
        if self._open is not None:
            file, self._open = self._open[1], None
            file.close()

    def abandon(self) -> None:
        """Close the open file, if any, although tensors are missing; in an object store cancel its upload instead."""
        if self._open is not None:
            file, self._open = self._open[1], None
            file.__exit__(OSError, OSError("the export has failed"), None)  # a file closes, an upload is cancelled


def header_of(tensors: Sequence[Planned]) -> bytes:
    """Return the first bytes of a safetensors file with these tensors: the header's length and the JSON header."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        ends = [offset, offset + tensor.num_bytes]
        header[tensor.name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ends}
        offset = ends[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors start aligned
    return len(text).to_bytes(8, "little") + text


def cut_shards(planned: Sequence[Planned], shard_bytes: int) -> list[list[Planned]]:
    """Return the tensors, in their order, as shards of at most ``shard_bytes``; a larger tensor has its own shard."""
    shards: list[list[Planned]] = [[]]
    free_bytes = shard_bytes
    for tensor in planned:
        if shards[-1] and tensor.num_bytes > free_bytes:
            shards.append([])
            free_bytes = shard_bytes
        shards[-1].append(tensor)
        free_bytes -= tensor.num_bytes
    return shards


def file_name(number: int, count: int) -> str:
    """Return the name of file ``number`` (from 0) of ``count`` safetensors files, as ``save_pretrained`` names them."""
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def index_text(files: Sequence[tuple[str, Sequence[Planned]]]) -> str:
    """Return the JSON text of model.safetensors.index.json for files given as (file name, tensors of that file)."""
    total = sum(tensor.num_bytes for _, tensors in files for tensor in tensors)
    names = {tensor.name: name for name, tensors in files for tensor in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
    return json.dumps(index, indent=2) + "\n"


class ShardWriter:
    """Writes tensors, in the order of ``planned``, to ``folder``: as model.safetensors, or as shards and their index.

    planned: the tensors to write.
    shard_bytes: the most bytes of a shard; a larger tensor has a shard of its own.

    Raises ConfigError for a dtype other than float32, bfloat16 and float16.
    """

    def __init__(self, folder: pathlib.Path | RemotePath, planned: Sequence[Planned], shard_bytes: int):
        shards = cut_shards(planned, shard_bytes)
        self.folder = folder
        self.files = [(file_name(i, len(shards)), shard) for i, shard in enumerate(shards)]
        self._writer = FileWriter(folder, self.files)
        self.add, self.abandon = self._writer.add, self._writer.abandon

    def finish(self) -> list[str]:
        """Close the last file, write the index if there are several files, and return the names of the files."""
        self._writer.finish()
        names = [name for name, _ in self.files]
        if len(names) > 1:
            (self.folder / INDEX).write_text(index_text(self.files))
            names.append(INDEX)
        return names

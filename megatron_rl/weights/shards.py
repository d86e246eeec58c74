"""Safetensors files written a tensor at a time, in shards under an index, as ``save_pretrained`` lays them out.

The format (safetensors 0.4 and later): 8 bytes little-endian with the header's length, a JSON
header with dtype, shape and offsets of each tensor, then the tensors' bytes. All names, shapes and
dtypes are known from the config before the first tensor is, so the header comes first and tensors
follow; safetensors' own ``save_file`` wants a whole file's tensors at once.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import torch

from megatron_rl.errors import ConfigError

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Describes a tensor to come: ``Planned(name="norm.weight", shape=(64,), dtype=torch.bfloat16)`` is 128 bytes.

    slices: the names under which it comes, a slice along its first dimension each, in their order;
        none where it comes whole.
    parts: above 0, a slice comes as the transposes of so many equal shares of its columns, under a
        name each.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slices: tuple[str, ...] = ()
    parts: int = 0

    @property
    def arrivals(self) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
        """Return (name, shape, dtype) of what is added for it."""
        if not self.slices:
            return ((self.name, self.shape, self.dtype),)
        size = (self.shape[2] // self.parts, self.shape[1]) if self.parts else self.shape[1:]
        return tuple((name, size, self.dtype) for name in self.slices)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ShardWriter:
    """Writes tensors to ``folder`` in the order of ``planned``: model.safetensors, or shards and their index.

    shard_bytes: the most bytes of a shard; a larger tensor has a shard of its own.

    Raises ConfigError for a dtype that is not one of DTYPE_NAMES.
    """

    def __init__(self, folder: pathlib.Path, planned: Sequence[Planned], shard_bytes: int):
        self.folder = folder
        for tensor in planned:
            if tensor.dtype not in DTYPE_NAMES:
                raise ConfigError(
                    f"{tensor.name} is {tensor.dtype}; only {', '.join(map(str, DTYPE_NAMES))} are written: choose one "
                    "with --dtype"
                )
        self._shards: list[list[Planned]] = [[]]
        free_bytes = shard_bytes
        for tensor in planned:
            if self._shards[-1] and tensor.num_bytes > free_bytes:
                self._shards.append([])
                free_bytes = shard_bytes
            self._shards[-1].append(tensor)
            free_bytes -= tensor.num_bytes
        self._waiting = [
            (number, arrival, tensor.parts)
            for number, shard in enumerate(self._shards)
            for tensor in shard
            for arrival in tensor.arrivals
        ]
        self._waiting.reverse()
        self._parts: list[torch.Tensor] = []  # of a slice that has not come whole
        self._open: tuple[int, BinaryIO] | None = None

    def file_name(self, number: int) -> str:
        count = len(self._shards)
        return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"

    def _start(self, number: int) -> BinaryIO:
        if self._open is not None:
            if self._open[0] == number:
                return self._open[1]
            self._open[1].close()
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in self._shards[number]:
            ends = [offset, offset + tensor.num_bytes]
            header[tensor.name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": ends,
            }
            offset = ends[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the tensors start aligned
        file = (self.folder / self.file_name(number)).open("wb")
        file.write(len(text).to_bytes(8, "little") + text)
        self._open = (number, file)
        return file

    def add(self, name: str, tensor: torch.Tensor) -> None:
        number, planned, parts = self._waiting.pop()
        arrived = (name, tuple(tensor.shape), tensor.dtype)
        assert arrived == planned, f"{arrived} came where {planned} was planned"
        if parts:
            self._parts.append(tensor.t().contiguous())
            if len(self._parts) < parts:
                return
            tensor, self._parts = torch.cat(self._parts, dim=1), []
        self._start(number).write(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))

    def finish(self) -> list[str]:
        """Close the last file, write the index where there are several files, and return the files' names."""
        waiting = self._waiting
        assert not waiting, f"{len(waiting)} planned tensors never came, {waiting[-1][1]} is the first"
        self.abandon()
        names = [self.file_name(i) for i in range(len(self._shards))]
        if len(names) > 1:
            total = sum(tensor.num_bytes for shard in self._shards for tensor in shard)
            files = {tensor.name: names[i] for i, shard in enumerate(self._shards) for tensor in shard}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
            names.append(INDEX)
        return names

    def abandon(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

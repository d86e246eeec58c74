"""safetensors files written a tensor at a time, in shards under an index, as ``save_pretrained`` lays them out.

The format (safetensors 0.4 and later): 8 bytes little-endian with the header's length, a JSON header with dtype, shape
and place of each tensor, then the tensors' bytes. All names, shapes and dtypes are known from the config before the
first tensor is, so the header comes first and tensors follow; safetensors' own ``save_file`` wants a whole file's
tensors at once.
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
    """A tensor to come. Example: ``Planned(name="model.norm.weight", shape=(64,), dtype=torch.bfloat16)``: 128
    bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ShardWriter:
    """Writes ``planned`` tensors, handed in in that order, to ``folder``: model.safetensors, or shards of at most
    ``shard_bytes`` each (a larger tensor has a shard of its own) and their index.

    Raises ConfigError for a dtype that is not one of DTYPE_NAMES.
    """

    def __init__(self, folder: pathlib.Path, planned: Sequence[Planned], shard_bytes: int):
        self.folder = folder
        for each in planned:
            if each.dtype not in DTYPE_NAMES:
                raise ConfigError(
                    f"{each.name} is {each.dtype}; only {', '.join(map(str, DTYPE_NAMES))} are written: choose one "
                    "with --dtype"
                )
        self._shards: list[list[Planned]] = [[]]
        room = shard_bytes
        for each in planned:
            if self._shards[-1] and each.num_bytes > room:
                self._shards.append([])
                room = shard_bytes
            self._shards[-1].append(each)
            room -= each.num_bytes
        self._waiting = [(number, each) for number, shard in enumerate(self._shards) for each in shard]
        self._waiting.reverse()
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
        for each in self._shards[number]:
            place = [offset, offset + each.num_bytes]
            header[each.name] = {"dtype": DTYPE_NAMES[each.dtype], "shape": list(each.shape), "data_offsets": place}
            offset = place[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the tensors start aligned
        file = (self.folder / self.file_name(number)).open("wb")
        file.write(len(text).to_bytes(8, "little") + text)
        self._open = (number, file)
        return file

    def add(self, name: str, tensor: torch.Tensor) -> None:
        number, each = self._waiting.pop()
        found = Planned(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
        assert found == each, f"{found} came where {each} was planned"
        self._start(number).write(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))

    def finish(self) -> list[str]:
        """Closes the last file and writes the index where there are several; returns the files' names."""
        assert not self._waiting, f"{len(self._waiting)} planned tensors never came, {self._waiting[-1]} is the first"
        self.abandon()
        names = [self.file_name(i) for i in range(len(self._shards))]
        if len(names) > 1:
            total = sum(each.num_bytes for shard in self._shards for each in shard)
            places = {each.name: names[i] for i, shard in enumerate(self._shards) for each in shard}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
            names.append(INDEX)
        return names

    def abandon(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

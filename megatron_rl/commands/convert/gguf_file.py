"""The reader of a GGUF file: its header at once, its tensors one at a time. A damaged or hostile file ends in an error.

The layout (github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3), in order:

- "GGUF", version, number of tensors, number of keys
- each key with its type and value
- each tensor's name, sizes (the fastest-varying dimension first), type and offset
- the tensors' bytes, aligned

The gguf library turns a tensor's quantized numbers into float32. Its own reader is not used, because
it does not check the file's counts and offsets. An array that claims 2^60 numbers would keep that
reader busy for ever.
"""

from __future__ import annotations

import math
import pathlib
import stat
import struct
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from megatron_rl.errors import ConfigError, quoted

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
MOST_COUNT = 2**22  # keys, tensors, or elements of a list: a vocabulary has half a million merges
MOST_DIMENSIONS = 4
STRING, ARRAY = 8, 9
SCALARS = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}


def gguf_library() -> ModuleType:
    """Return the package gguf; raise ConfigError if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise ConfigError("a GGUF file is read by the package gguf; pip install 'megatron_rl[gguf]'") from error
    return gguf


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Holds the type, shape and position of one tensor in a GGUF file.

    type_name: GGML's name of the quantization or number type.
    shape: the number of elements along each dimension, in torch's order.
    start: the offset of the tensor's first byte in the file.

    Example: ``type_name="Q8_0", shape=(49152, 576), start=1785664, num_bytes=30081024``.
    """

    type_name: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class GgufFile:
    """Holds a GGUF file's keys and the positions of its tensors; ``read`` returns a tensor's numbers.

    path: the file, whose header is read at once.
    values: {key: value}; a value is a number, a bool, a text, a list of texts, or an array of
        numbers.
    tensors: {name in the file: StoredTensor}.

    Raises ConfigError, naming the file, for a file that is no GGUF, is truncated, or holds invalid
    counts, types or offsets.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):
                raise ConfigError(f"{self.path} is no regular file; name a GGUF file")
            self._bytes = np.memmap(self.path, np.uint8, "r") if self.path.stat().st_size else np.zeros(0, np.uint8)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}") from error
        self._place = 0
        num_tensors, num_keys = self._read_start()
        self.values: dict[str, object] = {}
        for _ in range(num_keys):
            key = self._string("a key")
            if key in self.values:
                self._refuse(f"holds the key {quoted(key)} twice")
            self.values[key] = self._value(self._number("<u4", key), key)
        self.tensors = self._read_places(num_tensors)

    def _refuse(self, reason: str) -> None:
        raise ConfigError(f"{self.path} {reason}; copy or download it again")

    def _take(self, num_bytes: int, what: str) -> np.ndarray:
        if num_bytes > len(self._bytes) - self._place:
            self._refuse(f"ends inside {what}: byte {self._place} + {num_bytes} is beyond its {len(self._bytes)} bytes")
        self._place += num_bytes
        return self._bytes[self._place - num_bytes : self._place]

    def _number(self, kind: str, what: str):
        return self._take(np.dtype(kind).itemsize, what).view(kind)[0].item()

    def _count(self, kind: str, what: str, most: int = MOST_COUNT) -> int:
        count = self._number(kind, what)
        if count > most:
            self._refuse(f"says that {what} is {count}, and at most {most} are read")
        return count

    def _string(self, what: str) -> str:
        (length,) = struct.unpack("<Q", self._take(8, what))
        try:
            return self._take(length, what).tobytes().decode()
        except UnicodeDecodeError:
            self._refuse(f"holds a text that is not UTF-8: {what}")

    def _read_start(self) -> tuple[int, int]:
        """Check the file's magic bytes and version; return (number of tensors, number of keys)."""
        if (magic := self._bytes[:4].tobytes()) != MAGIC:
            raise ConfigError(f"{self.path} is no GGUF file: it begins with {quoted(magic)}, not with {MAGIC}")
        self._place = 4
        version = self._number("<u4", "the version")
        if version not in VERSIONS:
            kind = " of a big-endian host" if version & 0xFFFF == 0 else ""
            raise ConfigError(f"{self.path} is GGUF version {version}{kind}; versions 2 and 3, little-endian, are read")
        return self._count("<u8", "the number of tensors"), self._count("<u8", "the number of keys")

    def _value(self, kind: int, key: str) -> object:
        if kind == STRING:
            return self._string(key)
        if kind in SCALARS:
            value = self._number(SCALARS[kind], key)
            if not math.isfinite(value):
                self._refuse(f"gives the key {quoted(key)} the number {value}")
            return value
        if kind != ARRAY:
            self._refuse(f"gives the key {quoted(key)} the type {kind}, which GGUF does not have")
        kind, count = self._number("<u4", key), self._count("<u8", f"the length of {quoted(key)}")
        if kind == STRING:
            return [self._string(key) for _ in range(count)]
        if kind not in SCALARS:
            self._refuse(f"gives the list {quoted(key)} elements of type {kind}; numbers and texts are read")
        return self._take(count * np.dtype(SCALARS[kind]).itemsize, key).view(SCALARS[kind])

    def _read_places(self, num_tensors: int) -> dict[str, StoredTensor]:
        raw: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._string("a tensor's name")
            if name in raw:
                self._refuse(f"holds the tensor {quoted(name)} twice")
            dimensions = self._count("<u4", f"the number of dimensions of {quoted(name)}", MOST_DIMENSIONS)
            sizes = tuple(self._number("<u8", f"the shape of {quoted(name)}") for _ in range(dimensions))
            raw[name] = (sizes[::-1], *(self._number(x, f"the place of {quoted(name)}") for x in ("<u4", "<u8")))
        alignment = self.values.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
            self._refuse(f"has general.alignment={quoted(alignment)}, which is no power of two")
        start = -(-self._place // alignment) * alignment
        places = {name: self._stored(name, *facts, alignment, start) for name, facts in raw.items()}
        end, before = 0, ""
        for name, place in sorted(places.items(), key=lambda item: item[1].start):
            if place.start < end:
                self._refuse(f"puts the tensor {quoted(name)} over {quoted(before)}")
            end, before = place.start + place.num_bytes, name
        return places

    def _stored(
        self, name: str, shape: tuple[int, ...], kind: int, offset: int, alignment: int, start: int
    ) -> StoredTensor:
        gguf = gguf_library()
        where = f"the tensor {quoted(name)}"
        if not shape or 0 in shape or math.prod(shape) > 2**48:
            self._refuse(f"gives {where} the shape {list(shape)}")
        try:
            type_name = gguf.GGMLQuantizationType(kind).name
        except ValueError:
            self._refuse(f"gives {where} the type {kind}, which the installed gguf library does not know")
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        if shape[-1] % block:
            self._refuse(f"gives {where} rows of {shape[-1]} elements, and a block of {type_name} has {block}")
        num_bytes = math.prod(shape) // block * block_bytes
        if offset % alignment or start + offset + num_bytes > len(self._bytes):
            self._refuse(
                f"puts {where} at bytes {start + offset} to {start + offset + num_bytes}, and it has "
                f"{len(self._bytes)} bytes, tensors aligned to {alignment}"
            )
        return StoredTensor(type_name=type_name, shape=shape, start=start + offset, num_bytes=num_bytes)

    @property
    def num_elements(self) -> int:
        return sum(math.prod(place.shape) for place in self.tensors.values())

    def check_types(self) -> None:
        """Raise ConfigError if the gguf library cannot dequantize the type of one of the tensors."""
        gguf = gguf_library()
        for name, tensor in {tensor.type_name: (name, tensor) for name, tensor in self.tensors.items()}.values():
            kind = gguf.GGMLQuantizationType[tensor.type_name]
            try:
                gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            except NotImplementedError:
                raise ConfigError(
                    f"{self.path}: {name} is {tensor.type_name}, which the gguf library does not dequantize; take a "
                    "file of another quantization, F16 or Q8_0"
                ) from None

    def read(self, name: str) -> np.ndarray:
        """Return the tensor called ``name`` as float32 in its full shape, dequantized by the gguf library."""
        gguf, tensor = gguf_library(), self.tensors[name]
        kind = gguf.GGMLQuantizationType[tensor.type_name]
        stored = self._bytes[tensor.start : tensor.start + tensor.num_bytes]
        plain = {"F32": np.float32, "F16": np.float16}
        stored = stored.view(plain[tensor.type_name]) if tensor.type_name in plain else stored
        return gguf.dequantize(stored.reshape(*tensor.shape[:-1], -1), kind).reshape(tensor.shape)

"""A checksum of tensors' raw bytes, to tell whether tensors arrived bit for bit; the same on a CPU and a GPU.

The bytes are read as int64 words in a grid of ROW_WORDS columns, padded with zeros. Each row and
each column is summed modulo 2⁶⁴. The checksum is Σᵢ mix(i, vᵢ) over the vector v of column sums,
row sums and the number of bytes, where mix is splitmix64, a hash. A word enters the sum of its row and the
sum of its column, so that both its value and its position count.

The sums run on the tensor's device at the speed of the device's memory, without a copy of the
tensor.

The checksum sees every change of one word, and every swap of two words that differ. It misses a
change whose differences cancel in each row and in each column (four words at the corners of a
rectangle, say), or a collision of mix (2⁻⁶⁴). It is no defence against an adversary.

This module imports torch alone: an engine's process, which has no Megatron-Core, computes the
checksum too. It needs a little-endian host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

ROW_WORDS = 4096
ROW_BYTES = 8 * ROW_WORDS
# A slab is read twice, the second time from a CPU's cache: 1 to 4 MiB was fastest on a CPU. A GPU needs larger slabs.
SLAB_BYTES = {"cpu": 2**22, "cuda": 2**25}  # multiples of ROW_BYTES; no checksum depends on them


def checksum(tensor: torch.Tensor) -> int:
    """Return the checksum, 0 ≤ checksum < 2⁶⁴, of a tensor's bytes in the order of its elements.

    The checksum does not depend on the tensor's strides, dtype and shape. The call waits for the
    device. It copies nothing if the tensor is contiguous and aligned to 8 bytes. Otherwise it holds
    copies of at most two slabs of SLAB_BYTES (4 MiB on a CPU, 32 MiB on a GPU) at a time.
    """
    return int(_digest(tensor)) & (2**64 - 1)


class Checksum:
    """Computes one checksum over several tensors in order, each with its name, dtype and shape.

    Only ``value`` waits for a device.

    Example: ``seen = Checksum(); seen.update("model.norm.weight", x); seen.value()`` is 16
    hexadecimal digits.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[bytes, torch.Tensor]] = []

    @property
    def count(self) -> int:
        """Return the number of tensors that were added so far."""
        return len(self._parts)

    def update(self, name: str, tensor: torch.Tensor) -> None:
        """Add one tensor to the checksum; the tensor's memory may be reused after the call."""
        self._parts.append((repr((name, str(tensor.dtype), tuple(tensor.shape))).encode(), _digest(tensor)))

    def extend(self, other: Checksum) -> None:
        """Add the tensors of another ``Checksum`` (of a bucket, say) in their order, without reading them again."""
        self._parts.extend(other._parts)

    def value(self) -> str:
        """Return the checksum of the tensors added so far, 16 hexadecimal digits; more tensors may be added later."""
        total = hashlib.blake2b(digest_size=8)
        for header, digest in self._parts:
            total.update(len(header).to_bytes(8, "little") + header + (int(digest) & (2**64 - 1)).to_bytes(8, "little"))
        return total.hexdigest()


@torch.no_grad()
def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the checksum of a tensor's bytes as a 0-dimensional int64 tensor on the tensor's device."""
    num_bytes = tensor.numel() * tensor.element_size()
    # One vector from the start: small tensors between a slab's temporaries would fragment glibc's heap.
    vector = torch.zeros(ROW_WORDS + -(-num_bytes // ROW_BYTES) + 1, dtype=torch.int64, device=tensor.device)
    columns, rows = vector[:ROW_WORDS], vector[ROW_WORDS:-1]
    vector[-1] = num_bytes
    row = 0
    for slab in _slabs(tensor.detach(), SLAB_BYTES["cuda" if tensor.is_cuda else "cpu"]):
        whole = len(slab) // ROW_BYTES
        if whole:
            grid = slab[: whole * ROW_BYTES].view(torch.int64).view(whole, ROW_WORDS)
            rows[row : row + whole] = grid.sum(1)
            columns += grid.sum(0)
            row += whole
        if len(rest := slab[whole * ROW_BYTES :]):
            words = rest.new_zeros(-(-len(rest) // 8) * 8)
            words[: len(rest)] = rest
            words = words.view(torch.int64)
            rows[row] = words.sum()
            columns[: len(words)] += words
    return mix_words(vector).sum()


def mix_words(values: torch.Tensor, first: int = 1) -> torch.Tensor:
    """Return a hash of each value and its index: splitmix64 (Steele, Lea, Flood 2014), int64 [values].

    The hashed number is value + index · 0x9E3779B97F4A7C15 modulo 2⁶⁴. Indices count from
    ``first``.
    """
    z = torch.arange(first, first + len(values), device=values.device).mul_(_signed(0x9E3779B97F4A7C15)).add_(values)
    z = (z ^ _shifted(z, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    z = (z ^ _shifted(z, 27)).mul_(_signed(0x94D049BB133111EB))
    return z ^ _shifted(z, 31)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int64 values shifted right by ``bits`` with zeros filled in; torch's >> would repeat the sign bit."""
    return (values >> bits) & (2 ** (64 - bits) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _slabs(tensor: torch.Tensor, slab_bytes: int) -> Iterator[torch.Tensor]:
    """Yield a tensor's bytes in the order of its elements, uint8, in slabs of ``slab_bytes``; the last may be shorter.

    Each slab is aligned to 8 bytes. If the tensor is not, or not contiguous, its slabs are copied into
    one buffer, and each overwrites the one before.
    """
    if tensor.is_contiguous():
        flat = _bytes_of(tensor)
        if flat.storage_offset() % 8 == 0:
            yield from flat.split(slab_bytes)
            return
    slab = torch.empty(min(slab_bytes, tensor.numel() * tensor.element_size()), dtype=torch.uint8, device=tensor.device)
    filled = 0
    for piece in _pieces(tensor, slab_bytes):
        while len(piece):
            taken = piece[: slab_bytes - filled]
            slab[filled : filled + len(taken)] = taken
            filled += len(taken)
            piece = piece[len(taken) :]
            if filled == slab_bytes:
                yield slab
                filled = 0
    yield slab[:filled]


def _pieces(tensor: torch.Tensor, most_bytes: int) -> Iterator[torch.Tensor]:
    """Yield a tensor's bytes in the order of its elements, uint8, copying at most ``most_bytes`` at a time."""
    if tensor.is_contiguous():
        yield _bytes_of(tensor)
    elif tensor.numel() * tensor.element_size() <= most_bytes:
        yield _bytes_of(tensor.contiguous())
    elif len(tensor) == 1:
        yield from _pieces(tensor[0], most_bytes)
    else:
        row_bytes = tensor[0].numel() * tensor.element_size()
        for part in tensor.split(max(1, most_bytes // row_bytes)):
            yield from _pieces(part, most_bytes)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)

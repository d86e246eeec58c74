"""The digest of a packed bucket of tensors, to tell whether it arrived bit for bit; the same on a CPU and a GPU.

The bucket's bytes are read as signed 32-bit words in rows of ROW_WORDS, padded with zeros. Row r
has the sum hᵣ = Σ_c f_c · word[r, c] modulo 2⁶⁴. The factors f are odd, pseudorandom, and differ in
their lower 32 bits. The digest of a range of rows is Σᵣ mix(r, hᵣ), with splitmix64 as mix.

A bucket is cut into NUM_PARTS such ranges, its parts, each with a digest, so that each worker of an
engine may read a few of them. The bucket's checksum covers the parts' digests, the number of bytes
and the descriptions of the tensors. It takes two kernels per slab, some forty for a bucket of 128
MiB, whatever the number of tensors. The host waits for the device once.

A change of one word, or a swap of two that differ, always changes a row's sum. Any other change
within a row is missed for 2⁻⁶⁴ of the possible factors, and for 2⁻³³ if only the words' top bits
change. Rows do not cancel each other but by a collision of mix (2⁻⁶⁴). So a move within a bucket is
seen, as of two tensors that changed places. The digest is no defence against an adversary.

This module imports torch alone, as weights/checksum.py does, and needs a little-endian host.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch

from megatron_rl.weights.checksum import mix_words

NUM_PARTS = 8
ROW_WORDS = 8192
ROW_BYTES = 4 * ROW_WORDS
# Rows read at once, with twice their memory for the products; no digest depends on this number.
SLAB_ROWS = {"cpu": 32, "cuda": 1024}


def bucket_checksum(tensors: Sequence, packed: torch.Tensor) -> str:
    """Return the checksum of a bucket, 16 hexadecimal digits over its tensors' descriptions and its bytes.

    Waits for the device once.

    tensors: [name, dtype, shape, first byte] of each tensor, as the message has them.
    packed: [bytes] uint8, the tensors and the bytes between them.
    """
    return checksum_of(tensors, len(packed), part_digests(packed, range(NUM_PARTS)).tolist())


def checksum_of(tensors: Sequence, num_bytes: int, digests: Sequence[int]) -> str:
    """Return the checksum of a bucket of ``num_bytes`` bytes from the digests of its NUM_PARTS parts."""
    total = hashlib.blake2b(json.dumps([num_bytes, tensors]).encode(), digest_size=8)
    for digest_of_part in digests:
        total.update((digest_of_part & (2**64 - 1)).to_bytes(8, "little"))
    return total.hexdigest()


def part_bounds(num_bytes: int) -> list[int]:
    """Return the NUM_PARTS + 1 bounds of a bucket's parts: whole rows, but for the last part; some parts are empty.

    Example: a bucket of 20 rows has parts of 3, 3, 3, 3, 3, 3, 2 and 0 rows.
    """
    rows = -(-num_bytes // (ROW_BYTES * NUM_PARTS))
    return [min(num_bytes, part * rows * ROW_BYTES) for part in range(NUM_PARTS + 1)]


def parts_of(worker: int, workers: int) -> range:
    """Return the parts that one of an engine's workers checks.

    Together the workers check all parts; if they are more than the parts, some parts are checked
    twice.

    Example: the second of three workers checks parts 1, 4 and 7.
    """
    return range(worker % NUM_PARTS, NUM_PARTS, min(workers, NUM_PARTS))


def part_digests(packed: torch.Tensor, parts: Sequence[int], device: torch.device | None = None) -> torch.Tensor:
    """Return the digests of some parts of a bucket, int64 [len(parts)] on ``device``, which computes the sums.

    packed: [bytes] uint8, the whole bucket, aligned to 4 bytes. Only the given parts of it are
        read, or copied to another device.
    """
    bounds, device = part_bounds(len(packed)), packed.device if device is None else device
    factors = factors_on(device)
    if len(parts) == NUM_PARTS:
        mixed = mix_words(row_sums(packed.to(device), factors))
        padded = torch.zeros(NUM_PARTS, max(1, bounds[1] // ROW_BYTES), dtype=torch.int64, device=device)
        padded.view(-1)[: len(mixed)] = mixed
        return padded.sum(1)
    return torch.stack([_part_digest(packed, bounds[i], bounds[i + 1], factors) for i in parts])


def _part_digest(packed: torch.Tensor, start: int, end: int, factors: torch.Tensor) -> torch.Tensor:
    if start == end:
        return torch.zeros((), dtype=torch.int64, device=factors.device)
    return mix_words(row_sums(packed[start:end].to(factors.device), factors), first=1 + start // ROW_BYTES).sum()


@torch.no_grad()
def row_sums(packed: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row of bytes, int64 [rows] on the bytes' device."""
    whole, rest = divmod(len(packed), ROW_BYTES)
    sums = torch.empty(whole + bool(rest), dtype=torch.int64, device=packed.device)
    words = packed[: whole * ROW_BYTES].view(torch.int32).view(whole, ROW_WORDS)
    at_once = min(whole, SLAB_ROWS["cuda" if packed.is_cuda else "cpu"])
    products = torch.empty(at_once, ROW_WORDS, dtype=torch.int64, device=packed.device)
    for start in range(0, whole, max(1, at_once)):
        slab = words[start : start + at_once]
        torch.mul(slab, factors, out=products[: len(slab)])
        torch.sum(products[: len(slab)], 1, out=sums[start : start + len(slab)])
    if rest:
        last = packed.new_zeros(ROW_BYTES)
        last[:rest] = packed[whole * ROW_BYTES :]
        torch.sum(last.view(torch.int32) * factors, 0, out=sums[whole])
    return sums


def factors_on(device: torch.device) -> torch.Tensor:
    """Return the factors, made anew: kept ones could lie in memory that a sleeping engine gives away."""
    return mix_words(torch.zeros(ROW_WORDS, dtype=torch.int64, device=device)) | 1

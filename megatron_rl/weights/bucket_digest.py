"""Digest of a packed bucket of tensors, to tell whether it arrived bit for bit; alike on a CPU and a GPU.

The bucket's bytes are read as signed 32-bit words in rows of ROW_WORDS, zeros after the last. Row r
has the sum hᵣ = Σ_c f_c · word[r, c] modulo 2⁶⁴, where the factors f are odd, pseudorandom, and
differ in their lower 32 bits; the digest of a range of rows is Σᵣ mix(r, hᵣ), with splitmix64 as
mix. A bucket has the digests of NUM_PARTS such ranges, its parts, so that the workers of an engine
may read some each, and its checksum has them, its number of bytes and what it says of its tensors.
That takes two kernels per slab, some forty for a bucket of 128 MiB, whatever the number of tensors
in it, and one question to the device.

A change of one word, or a swap of two that differ, always changes a row's sum. Any other change
within a row is missed for 2⁻⁶⁴ of the possible factors, and for 2⁻³³ where it is in the words' top
bits alone; rows do not cancel each other but by a collision of mix (2⁻⁶⁴). So nothing that moved
within a bucket is missed by its place, as two tensors that changed places. It is no defence against
an adversary.

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
# Read at once, with twice their memory for the products; no digest depends on them.
SLAB_ROWS = {"cpu": 32, "cuda": 1024}


def bucket_checksum(tensors: Sequence, packed: torch.Tensor) -> str:
    """Return 16 hexadecimal digits of a bucket: what it says of its tensors, and its bytes. Waits for the device once.

    tensors: [name, dtype, shape, first byte] of each tensor, as the message has them.
    packed: [bytes] uint8, the tensors and what lies between them.
    """
    return checksum_of(tensors, len(packed), part_digests(packed, range(NUM_PARTS)).tolist())


def checksum_of(tensors: Sequence, num_bytes: int, digests: Sequence[int]) -> str:
    """Return the checksum of a bucket of so many bytes and these digests, one for each of its NUM_PARTS parts."""
    total = hashlib.blake2b(json.dumps([num_bytes, tensors]).encode(), digest_size=8)
    for digest_of_part in digests:
        total.update((digest_of_part & (2**64 - 1)).to_bytes(8, "little"))
    return total.hexdigest()


def part_bounds(num_bytes: int) -> list[int]:
    """Return the NUM_PARTS + 1 places between which the parts of a bucket lie: whole rows but for the last, some empty.

    Example: a bucket of 20 rows has parts of 3, 3, 3, 3, 3, 3, 2 and 0 rows.
    """
    rows = -(-num_bytes // (ROW_BYTES * NUM_PARTS))
    return [min(num_bytes, part * rows * ROW_BYTES) for part in range(NUM_PARTS + 1)]


def parts_of(worker: int, workers: int) -> range:
    """Return the parts that one of an engine's workers checks; together they check all, some twice where they are more.

    Example: the second of three workers checks parts 1, 4 and 7.
    """
    return range(worker % NUM_PARTS, NUM_PARTS, min(workers, NUM_PARTS))


def part_digests(packed: torch.Tensor, parts: Sequence[int], device: torch.device | None = None) -> torch.Tensor:
    """Return the digests of some parts of a bucket, int64 [len(parts)] on the device, which does the sums.

    packed: [bytes] uint8 from a multiple of 4 on, the whole bucket; only these parts of it are
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
    """Return the sum of each row of bytes, int64 [rows] on their device."""
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
    """Make the factors anew: kept ones could lie in memory that a sleeping engine gives away."""
    return mix_words(torch.zeros(ROW_WORDS, dtype=torch.int64, device=device)) | 1

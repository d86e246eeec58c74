"""The digest of a bucket (tensors packed in one buffer), to tell whether the bucket arrived bit for bit.

A CPU and a GPU compute equal digests. The bucket's bytes are read as signed 32-bit words in rows of
ROW_WORDS, padded with zeros. Each column c has a factor f_c, odd and pseudorandom; no two factors
have equal lower 32 bits. Row r has the sum hᵣ = Σ_c f_c · word[r, c] modulo 2⁶⁴. The digest of a
range of rows is Σᵣ mix(r, hᵣ), where mix is splitmix64, a hash.

A bucket is cut into NUM_PARTS ranges of rows, the bucket's parts. Each part has a digest, so that
each worker of an inference engine may read a few parts only. The bucket's checksum covers the
digests of the parts, the number of bytes and the descriptions of the tensors.

If one word changes, or two different words change places, a row's sum always changes. Any other
change within a row is missed with a probability of 2⁻⁶⁴ (2⁻³³ if only the top bits of words
change). Changes in several rows, such as two tensors that change places, are missed only if values
of mix collide (2⁻⁶⁴). The digest is no defence against an adversary.

This module imports torch alone, since engines' processes, which lack Megatron-Core, import it too.
It needs a little-endian host.
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
# Rows read at once, with twice their memory for the products; no digest depends on this number. The digests take two
# kernels per slab, some forty for a bucket of 128 MiB.
SLAB_ROWS = {"cpu": 32, "cuda": 1024}


def bucket_checksum(tensors: Sequence, packed: torch.Tensor) -> str:
    """Return the checksum of a bucket, 16 hexadecimal digits, over its tensors' descriptions and its bytes.

    The call waits for the device once.

    tensors: [name, dtype, shape, first byte] of each tensor in the bucket.
    packed: [bytes] uint8, the tensors and the padding between them.
    """
    return checksum_of(tensors, len(packed), part_digests(packed, range(NUM_PARTS)).tolist())


def checksum_of(tensors: Sequence, num_bytes: int, digests: Sequence[int]) -> str:
    """Return the checksum of a bucket, 16 hexadecimal digits, from the digests of its NUM_PARTS parts.

    tensors: [name, dtype, shape, first byte] of each tensor.
    num_bytes: the bytes of the bucket.
    digests: the digest of each part, in order, as an integer.
    """
    total = hashlib.blake2b(json.dumps([num_bytes, tensors]).encode(), digest_size=8)
    for digest_of_part in digests:
        total.update((digest_of_part & (2**64 - 1)).to_bytes(8, "little"))
    return total.hexdigest()


def part_bounds(num_bytes: int) -> list[int]:
    """Return the byte offsets at which a bucket's NUM_PARTS parts begin, and last the bucket's end, in ascending order.

    A part is a range of rows of ROW_BYTES bytes; only the bucket's last row may be shorter. A small
    bucket's last parts are empty.

    Example: a bucket of 20 rows has parts of 3, 3, 3, 3, 3, 3, 2 and 0 rows.
    """
    rows = -(-num_bytes // (ROW_BYTES * NUM_PARTS))
    return [min(num_bytes, part * rows * ROW_BYTES) for part in range(NUM_PARTS + 1)]


def parts_of(worker: int, workers: int) -> range:
    """Return the numbers of the parts of a bucket whose digests one worker of an inference engine computes.

    Together the workers compute all digests. If there are more workers than parts, some digests
    are computed twice.

    worker: the worker's number, from 0.
    workers: the number of workers.

    Example: worker 1 of 3 has parts 1, 4 and 7.
    """
    return range(worker % NUM_PARTS, NUM_PARTS, min(workers, NUM_PARTS))


def part_digests(packed: torch.Tensor, parts: Sequence[int], device: torch.device | None = None) -> torch.Tensor:
    """Return the digests of some parts of a bucket, computed on ``device``, int64 [len(parts)].

    packed: [bytes] uint8, the whole bucket, aligned to 4 bytes. Only the given parts of it are
        read, or copied to another device.
    parts: the numbers of the parts.
    device: where the digests are computed; None for the device of ``packed``.
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
    """Return Σ_c factors[c] · word[r, c] modulo 2⁶⁴ for each row r of ROW_WORDS words, int64 [rows].

    The sums are on the device of ``packed``.

    packed: [bytes] uint8, read as signed 32-bit words; the last row is padded with zeros.
    factors: int64 [ROW_WORDS], as ``factors_on`` returns them.
    """
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
    """Return the factors by which ``row_sums`` multiplies a row's words, int64 [ROW_WORDS] on ``device``.

    Each call computes the factors anew.
    """
    # Stored factors could lie in GPU memory that an engine releases while it sleeps.
    return mix_words(torch.zeros(ROW_WORDS, dtype=torch.int64, device=device)) | 1

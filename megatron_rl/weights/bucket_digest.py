"""Digest of a packed bucket of tensors, to tell whether it arrived bit for bit; alike on a CPU and a GPU.

The bucket's bytes are read as signed 32-bit words in rows of ROW_WORDS, zeros after the last. Row r has the sum
hᵣ = Σ_c f_c · word[r, c] modulo 2⁶⁴, where the factors f are odd, pseudorandom, and differ in their lower 32 bits; the
digest is Σᵢ mix(i, hᵢ) over the rows' sums and the number of bytes, with splitmix64 as mix. It takes two kernels per
slab, some forty for a bucket of 128 MiB, whatever the number of tensors in it, and one question to the device.

A change of one word, or a swap of two that differ, always changes a row's sum. Any other change within a row is missed
for 2⁻⁶⁴ of the possible factors, and for 2⁻³³ where it is in the words' top bits alone; rows do not cancel each other
but by a collision of mix (2⁻⁶⁴). So nothing that moved within a bucket is missed by its place, as two tensors that
changed places. It is no defence against an adversary.

This module imports torch alone, as weights/checksum.py does, and needs a little-endian host.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch

from megatron_rl.weights.checksum import mix_words

ROW_WORDS = 8192
ROW_BYTES = 4 * ROW_WORDS
# Read at once, with twice their memory for the products; no digest depends on them.
SLAB_ROWS = {"cpu": 32, "cuda": 1024}


def bucket_checksum(tensors: Sequence, packed: torch.Tensor) -> str:
    """Return 16 hexadecimal digits of a bucket: what it says of its tensors, and its bytes. Waits for the device once.

    tensors: [name, dtype, shape, first byte] of each tensor, as the message has them.
    packed: [bytes] uint8, the tensors and what lies between them.
    """
    return checksum_of(tensors, digest(packed))


def checksum_of(tensors: Sequence, seen: torch.Tensor) -> str:
    """Return the checksum of a bucket whose digest is under way, and wait for that."""
    total = hashlib.blake2b(json.dumps(tensors).encode(), digest_size=8)
    total.update((int(seen) & (2**64 - 1)).to_bytes(8, "little"))
    return total.hexdigest()


@torch.no_grad()
def digest(packed: torch.Tensor) -> torch.Tensor:
    """Return the digest of bytes, [bytes] uint8 from a multiple of 4 on, as 0-dimensional int64 on their device."""
    whole, rest = divmod(len(packed), ROW_BYTES)
    sums = torch.empty(whole + bool(rest) + 1, dtype=torch.int64, device=packed.device)
    sums[-1:].fill_(len(packed))
    factors = factors_on(packed.device)
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
    return mix_words(sums).sum()


def factors_on(device: torch.device) -> torch.Tensor:
    """Make the factors anew: kept ones could lie in memory that a sleeping engine gives away."""
    return mix_words(torch.zeros(ROW_WORDS, dtype=torch.int64, device=device)) | 1

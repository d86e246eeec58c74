"""Bytes that the tests take digests of, and the digests' mixing function in Python's integers."""

import itertools
from collections.abc import Callable, Iterable, Iterator

import torch

MASK = 2**64 - 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool)


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def mix(i: int, value: int) -> int:
    z = (i * 0x9E3779B97F4A7C15 + value) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def under_flips(value: Callable, data: torch.Tensor, places: Iterable[int]) -> Iterator:
    """Yield the value of the data as they are, and with each bit of each place flipped alone."""
    yield value(data)
    for place, bit in itertools.product(places, range(8)):
        data[place] ^= 1 << bit
        yield value(data)
        data[place] ^= 1 << bit

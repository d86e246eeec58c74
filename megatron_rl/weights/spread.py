"""The start of float32 masters at random within the intervals that round to their bfloat16 weights.

AdamW steps a float32 master of each bfloat16 weight, and the model runs the master rounded. If the
files are in bfloat16 themselves, each master begins in the middle of its interval. A rate of 1e-6
then moves a weight of 0.02 only after 60 steps: until then the policy that rolls out stays as it
is. A master that begins anywhere in its interval, all places equally probable, is carried over the
interval's end by a step of size δ with the probability δ / width. So the rounded weights move by δ
in the mean from the first step on. At the start each of them is the file's, to the bit.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from megatron_rl.weights.reader import WeightReader

BLOCK = 16  # numbers of 16 bits that Philox gives for one value of its counter
PIECE = 1 << 22  # numbers drawn at once
HALF = 1 << 15  # from a bfloat16 number to the end of its interval, in steps of float32


class SpreadReader:
    """Reads bfloat16 tensors of another reader as float32 numbers that round to them; other tensors as they are.

    A number depends on ``seed``, the tensor's name and the element's place in the whole tensor, so
    that every parallel layout reads the same.

    found: whether a tensor was in bfloat16, among those read so far.
    """

    def __init__(self, reader: WeightReader, seed: int) -> None:
        self.reader, self.seed, self.found = reader, seed, False

    def has(self, name: str) -> bool:
        return self.reader.has(name)

    def size(self, name: str) -> tuple[int, ...]:
        return self.reader.size(name)

    def read(self, name: str, dimension: int, start: int, stop: int) -> torch.Tensor:
        part = self.reader.read(name, dimension, start, stop)
        if part.dtype != torch.bfloat16:
            return part
        self.found = True
        size = self.size(name)
        inner = int(np.prod(size[1:], dtype=np.int64))
        key = int.from_bytes(hashlib.sha256(f"{self.seed}/{name}".encode()).digest()[:16])
        spread = torch.empty(part.shape, dtype=torch.float32)
        first_row = start if dimension == 0 else 0
        rows = max(1, PIECE // max(inner, 1))
        for row in range(0, part.shape[0], rows):
            block = part[row : row + rows]
            drawn = draw(key, (first_row + row) * inner, block.shape[0] * inner)
            drawn = drawn.view(block.shape[0], *size[1:])
            spread[row : row + rows] = spread_out(block, drawn if dimension == 0 else drawn[:, start:stop])
        return spread


def draw(key: int, first: int, count: int) -> torch.Tensor:
    """Return int32 [count], uniform in −32768 … 32767: the numbers ``first``, ``first`` + 1, … of a key's sequence.

    key: 128 bits; numpy's Philox gives the sequence (Salmon et al. 2011, "Parallel random numbers: as
        easy as 1, 2, 3"), any part of it at once.
    """
    skipped = first % BLOCK
    blocks = -(-(skipped + count) // BLOCK)
    raw = np.random.Philox(key=key, counter=first // BLOCK).random_raw(blocks * BLOCK // 4)
    numbers = torch.from_numpy(raw.view(np.int16))
    return numbers[skipped : skipped + count].to(torch.int32)


def spread_out(values: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers that round to ``values``, at the places ``drawn`` of their intervals; 0 stays 0.

    values: bfloat16.
    drawn: int32 of the same shape, −32768 … 32767: the steps of float32 away from the value. The tie
        −32768, which may round to the neighbour, is taken as 0.
    """
    exact = values.float()
    steps = torch.where((drawn == -HALF) | (exact == 0), 0, drawn)
    return (exact.view(torch.int32) + steps).view(torch.float32)

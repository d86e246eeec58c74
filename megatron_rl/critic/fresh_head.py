"""A reader of model weights that adds a value head of zeros if the weights have none."""

from __future__ import annotations

import torch

from megatron_rl.weights.mapping import VALUE_HEAD
from megatron_rl.weights.reader import WeightReader

HEAD = VALUE_HEAD.hf[0]


class FreshHead:
    """Reads weights from another reader; if they have no value head, it gives a head of zeros.

    Then every value is 0 at first.
    """

    def __init__(self, reader: WeightReader, hidden_size: int) -> None:
        self.reader, self.zeros = reader, torch.zeros(1, hidden_size)

    def has(self, name: str) -> bool:
        return name == HEAD or self.reader.has(name)

    def size(self, name: str) -> tuple[int, ...]:
        return self.reader.size(name) if self.reader.has(name) or name != HEAD else tuple(self.zeros.shape)

    def read(self, name: str, dimension: int, start: int, stop: int) -> torch.Tensor:
        if name == HEAD and not self.reader.has(name):
            return self.zeros.narrow(dimension, start, stop - start)
        return self.reader.read(name, dimension, start, stop)

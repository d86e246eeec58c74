"""The reading of MXFP4, the format of the experts in gpt-oss's released files, as the bfloat16 numbers it encodes.

The format is Microscaling Formats v1.0 (Open Compute Project, section 5.3 and 6.3). 32 numbers
share a scale: a byte that holds the exponent of a power of two plus 127. Each number has four bits:
sign, two bits of exponent, one of mantissa.

In the files ``…_blocks`` is uint8 [experts, rows, groups, 16], two numbers in a byte, the first in
the low half. ``…_scales`` is uint8 [experts, rows, groups]. In transformers' bfloat16 layout the
same tensor is transposed, [experts, 32 · groups, rows] (5.19 ``integrations/mxfp4.py``).
"""

from __future__ import annotations

import torch

GROUP = 32  # numbers that share a scale; they take 16 bytes
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)])


def unpack(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers that blocks and scales of MXFP4 stand for, bfloat16 [..., rows, 32 · groups].

    The numbers are exact, except at the ends of bfloat16's range.

    blocks: uint8 [..., rows, groups, 16], two numbers in a byte.
    scales: uint8 [..., rows, groups].

    Example: the byte 0x21 holds the code 1 (0.5), then the code 2 (1.0); scale 128 is a factor of 2.
    So the byte stands for 1.0 and 2.0.
    """
    # exact, since a number has two significant bits and a scale is a power of two
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32) - 127
    return torch.ldexp(_VALUES.to(torch.bfloat16)[codes.long()], exponents[..., None]).flatten(-2)


class PackedExpert:
    """Reads slices of one expert's matrix, in the bfloat16 layout [32 · groups, rows], from a stack in MXFP4.

    blocks, scales: safetensors' slice objects (``get_slice``) of the stack's two tensors.
    expert: the expert's number.
    """

    def __init__(self, blocks, scales, expert: int):
        self.blocks, self.scales, self.expert = blocks, scales, expert

    def get_shape(self) -> list[int]:
        _, rows, groups, _ = self.blocks.get_shape()
        return [groups * GROUP, rows]

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: slice | tuple[slice, slice]) -> torch.Tensor:
        columns, rows = index if isinstance(index, tuple) else (index, slice(None))
        packed = self.blocks[self.expert, rows], self.scales[self.expert, rows]
        return unpack(*packed).t()[columns]

"""The rotation of queries and keys by each token's rotary angles within the core attention, in few kernels.

Megatron-Core (0.16.1 and 0.19.2 ``models/common/embeddings/rope_utils.py``) computes cosine and
sine in every layer, for queries and again for keys. Its rotation launches 24 kernels forward and 24
backward, half of all kernels of a layer. Here the rotation of the queries launches three kernels
forward and three backward, and so does that of the keys. Cosine and sine are computed once per
micro-batch.
"""

from __future__ import annotations

import torch


def token_angles(position_ids: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Return float32 [T, d / 2], the rotary angles of tokens at ``position_ids`` [T].

    inv_freq: float32 [d / 2], the inverse frequencies.
    """
    return torch.outer(position_ids.to(inv_freq.dtype), inv_freq)


def cos_and_sin(angles: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cosine, sine) of rotary angles [T, d / 2], each [T, 1, d / 2] in ``dtype``."""
    return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(heads, cos, sin, 1)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _turned(gradient, *ctx.saved_tensors, -1), None, None


def _turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    half = cos.shape[-1]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    turning = heads[..., : 2 * half].unflatten(-1, (2, half))
    if rest.shape[-1]:
        turned = torch.empty_like(heads, memory_format=torch.contiguous_format)
        torch.mul(turning, cos[..., None, :], out=turned[..., : 2 * half].unflatten(-1, (2, half)))
        turned[..., 2 * half :].copy_(rest)
    else:
        turned = (turning * cos[..., None, :]).flatten(-2)
    turned[..., :half].addcmul_(second, sin, value=-sign)
    turned[..., half : 2 * half].addcmul_(first, sin, value=sign)
    return turned


def turn(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the heads [T, n, d] rotated by the rotary angles whose cosine and sine are ``cos`` and ``sin``.

    cos, sin: [T, 1, h] in the heads' dtype, h ≤ d / 2.

    Column i is rotated with column h + i, for each i < h. Columns from 2 h on stay as they are. In
    bfloat16 the result is rounded twice.
    """
    return _Turn.apply(heads, cos, sin)

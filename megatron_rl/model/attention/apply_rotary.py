"""Turns queries and keys by rotary angles that come with the tokens, in few kernels, within the core attention.

Megatron-Core's own way (0.16.1 and 0.19.2 ``models/common/embeddings/rope_utils.py``) takes cosine
and sine anew in every layer, for queries and for keys, and turns in 24 kernels forward and as many
backward: half of those of a layer, as tests/latest counts them on a device that is not there. Here
it is three for each of the two, forward and backward, and cosine and sine are taken once a
micro-batch.
"""

from __future__ import annotations

import torch


def token_angles(position_ids: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Return [T, d / 2] float32, the angles of tokens at ``position_ids`` [T]; inv_freq: [d / 2]."""
    return torch.outer(position_ids.to(inv_freq.dtype), inv_freq)


def cos_and_sin(angles: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of angles [T, d / 2], as [T, 1, d / 2] in ``dtype``."""
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
    """Return heads [T, n, d] turned: their first 2 h columns are two halves whose pairs turn, the rest stays.

    cos, sin: [T, 1, h] in the heads' dtype, h ≤ d / 2. In bfloat16 the result is rounded twice.
    """
    return _Turn.apply(heads, cos, sin)

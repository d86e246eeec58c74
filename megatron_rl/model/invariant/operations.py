"""Row-invariant operations: a row's result has the same bits whatever other rows are computed with it.

A matrix product's order of summation may depend on its number of rows. An exponential's rounding may
depend on the element's place within a vector register. So every product and every sum runs over
blocks of ``BLOCK_ROWS`` rows, the last one padded. Every function of single elements runs over
pieces that fill whole vector registers, and that are too small for torch to split over threads.

One assumption remains: a kernel that is called with one shape treats all rows alike.
tests/unit/model/test_invariant.py tests this for the kernels of its host. Gradients come from the
ordinary operations. Fixed shapes are the idea of Thinking Machines Lab, "Defeating Nondeterminism in
LLM Inference" (2025).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

BLOCK_ROWS = 32  # rows of every matrix product and of every sum over rows' elements
PIECE = 16_384  # elements; torch splits functions of single elements over threads from 32,768 on
LANES = 64  # elements; a loop of vector registers takes 32 at once in float32, 64 in bfloat16
ALIGNMENT = 64  # bytes, to which torch aligns the memory that it allocates on a CPU


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x if it is contiguous and its memory is aligned to ``ALIGNMENT`` bytes, else a copy that is both."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def padded(block: torch.Tensor) -> torch.Tensor:
    """Return a block [r, K] of at most BLOCK_ROWS rows, filled up with rows of zeros to [BLOCK_ROWS, K]."""
    missing = BLOCK_ROWS - len(block)
    return torch.cat([block, block.new_zeros(missing, block.shape[1])]) if missing else block


def in_blocks(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return function(x) [R, …], called on blocks of ``BLOCK_ROWS`` rows of x [R, K]; zeros fill up the last block."""
    blocks = aligned(x).split(BLOCK_ROWS)  # without rows: one empty block
    return torch.cat([function(padded(block))[: len(block)] for block in blocks])


def elementwise(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return function(x) in the shape of x; an element's result does not depend on its place in x.

    The function acts on single elements. It is called on pieces that fill whole vector registers.
    """
    flat = aligned(x).view(-1)
    result = torch.empty_like(flat)
    whole = flat.numel() // LANES * LANES
    for start in range(0, whole, PIECE):
        piece = slice(start, min(start + PIECE, whole))
        result[piece] = function(flat[piece])
    if rest := flat.numel() - whole:
        last = flat.new_ones(LANES)
        last[:rest] = flat[whole:]
        result[whole:] = function(last)[:rest]
    return result.view(x.shape)


def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x [R, K] times the transpose of weight [N, K]; a row's result has the same bits in any batch.

    No gradient passes through.
    """
    weight = aligned(weight).t()
    return in_blocks(lambda block: block @ weight, x)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return matmul(x.flatten(0, -2), weight).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        gradient = gradient.flatten(0, -2)
        for_x = (gradient @ weight).view(x.shape) if needs_x else None
        if for_x is not None and ctx.group is not None:
            dist.all_reduce(for_x, group=ctx.group)
        return for_x, gradient.t() @ x.flatten(0, -2) if needs_weight else None, None


def linear(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return x [..., K] times the transpose of weight [N, K], as [..., N].

    A row's result has the same bits in any batch.

    group: the ranks over which backward sums the gradient of x; None if it sums nothing.
    """
    return _Linear.apply(x, weight, group)


def ordered_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors, added up in their order in float32 and cast to their dtype."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


class _RankSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return ordered_sum(parts)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def rank_sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of x over a group's ranks, added up in the order of the ranks.

    Backward passes the sum's gradient to every rank unchanged.
    """
    return x if group.size() == 1 else _RankSum.apply(x, group)


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return elementwise(F.silu, x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(gradient, x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return x · sigmoid(x); an element's result does not depend on its place in x.

    The gradient is torch's ordinary one.
    """
    return _Silu.apply(x)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm of x as RMSNorm of model/layer_spec.py does.

    The norm is computed in float32, cast to x's dtype, then multiplied by the weight.
    """
    return weight * F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps

        def norm(block: torch.Tensor) -> torch.Tensor:
            wide = block.float()
            mean = wide.square().sum(-1, keepdim=True) / wide.shape[-1]
            return (wide * elementwise(torch.rsqrt, mean + eps)).to(block.dtype)

        return weight * in_blocks(norm, x.flatten(0, -2)).view(x.shape)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            result = _rms_norm(x, weight, ctx.eps)
        return *torch.autograd.grad(result, (x, weight), gradient), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return weight [H] · x [..., H] / √(mean of x² + eps); a row's result has the same bits in any batch.

    The quotient is computed in float32 and cast to x's dtype before the product with the weight.
    """
    return _Norm.apply(x, weight, eps)

"""What Transformer Engine's linears do over tensor ranks: each pair of collectives with its backward."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    whole = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


def scattered_sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    part = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(part, x.contiguous(), group=group)
    return part


def summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    whole = x.clone()
    dist.all_reduce(whole, group=group)
    return whole


class Gather(torch.autograd.Function):
    """Gathers along the first dimension; backward sums the ranks' gradients and keeps its own part."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return scattered_sum(gradient, ctx.group), None


class ScatterSum(torch.autograd.Function):
    """Sums over ranks and keeps a part of the first dimension; backward gathers."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return scattered_sum(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient, ctx.group), None


class Copy(torch.autograd.Function):
    """Hands its input on; backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient, ctx.group), None


class Sum(torch.autograd.Function):
    """Sums over ranks; backward hands the gradient on."""

    @staticmethod
    def forward(ctx, x, group):
        return summed(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None

"""What Transformer Engine's linears do over tensor ranks: each pair of collectives with its backward."""

from __future__ import annotations

from collections.abc import Callable

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


def pair(forth: Callable, back: Callable) -> type[torch.autograd.Function]:
    """Return a function of (tensor, group) whose backward is ``back`` of (gradient, group)."""

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return forth(x, group)

        @staticmethod
        def backward(ctx, gradient):
            return back(gradient, ctx.group), None

    return Pair


# along the first dimension: backward sums the ranks' gradients and keeps its own part, and the reverse
Gather, ScatterSum = pair(gathered, scattered_sum), pair(scattered_sum, gathered)
# hands its input on, and backward sums the ranks' gradients; and the reverse
Copy, Sum = pair(lambda x, group: x.view_as(x), summed), pair(summed, lambda gradient, group: gradient)

"""Context parallelism of a gated delta net: each rank gets all tokens of some of its groups, or all tokens of all.

The rule needs a sequence from its first token to its last, and context ranks hold pieces of it. If the
context ranks divide the groups (a head of q and k, with its heads of v), they exchange tokens for
groups: each computes its share of the groups over whole sequences, and a second exchange brings the
outputs back to the tokens' ranks. So no rank computes what another does. Otherwise all tokens are
gathered, and every rank computes all of them and keeps its own.

docs/evidence/performance.md has both ways' times. Handing a state from rank to rank would make ranks
wait for each other 2·CP times in every layer, as each rank holds two pieces of a sequence.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.distributed.platform import send
from megatron_rl.model.attention.packed import PackedSequences, gather_context
from megatron_rl.model.attention.spans import ContextShard, context_positions


class _AllToAll(torch.autograd.Function):
    """Sends slice i of [CP, …] to context rank i, and returns the slices that come from all ranks.

    Backward sends the gradients the other way.
    """

    @staticmethod
    def forward(ctx, slices: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchanged(slices, group)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(gradient, ctx.group), None


def _exchanged(slices: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    slices = slices.contiguous()
    received = torch.empty_like(slices)
    dist.all_to_all_single(received, slices, group=group)
    return received


def exchanges_groups(groups: int, context: ContextShard) -> bool:
    """Return whether context ranks exchange tokens for groups, as they do if their number divides ``groups``."""
    return context.size > 1 and groups % context.size == 0


def own_groups(groups: int, context: ContextShard) -> tuple[int, int]:
    """Return (first, number) of the groups that this rank computes for all tokens."""
    if not exchanges_groups(groups, context):
        return 0, groups
    return context.rank * (groups // context.size), groups // context.size


def all_tokens(projected: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
    """Return [T', own groups, …], the projections of all T' tokens of the micro-batch, in order.

    projected: [T, groups, …] of this rank's tokens.
    """
    context = packed.context
    if not exchanges_groups(projected.shape[1], context):
        return gather_context(projected, packed) if context.size > 1 else projected
    slices = projected.unflatten(1, (context.size, -1)).movedim(1, 0)
    received = _AllToAll.apply(slices, context.group).flatten(0, 1)
    return received.index_select(0, packed.once("delta net's order", lambda: _orders(packed))[0])


def own_tokens(outputs: torch.Tensor, groups: int, packed: PackedSequences) -> torch.Tensor:
    """Return [T, heads, …], the outputs of this rank's tokens for all heads of its groups.

    outputs: [T', own heads, …] of all tokens, in the micro-batch's order.
    groups: the number of groups of this tensor rank.
    """
    context = packed.context
    if context.size == 1:
        return outputs
    if not exchanges_groups(groups, context):
        return outputs.index_select(0, packed.once("delta net's own", lambda: _own_rows(packed)))
    by_rank = outputs.index_select(0, packed.once("delta net's order", lambda: _orders(packed))[1])
    received = _AllToAll.apply(by_rank.unflatten(0, (context.size, -1)), context.group)
    return received.movedim(0, 1).flatten(1, 2)


def _own_rows(packed: PackedSequences) -> torch.Tensor:
    """Return int64 [T], the indices of this context rank's tokens among those of all ranks, in its order."""
    own = context_positions(packed.layout.lengths, packed.context.rank, packed.context.size)
    return send(torch.from_numpy(own), packed.position_ids.device)


def _orders(packed: PackedSequences) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 [T'] twice: the place of each token among the ranks' tokens, and the token at each such place."""
    size, lengths = packed.context.size, packed.layout.lengths
    tokens = np.concatenate([context_positions(lengths, rank, size) for rank in range(size)])
    device = packed.position_ids.device
    return send(torch.from_numpy(np.argsort(tokens)), device), send(torch.from_numpy(tokens), device)

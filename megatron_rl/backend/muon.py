"""Muon: a matrix is stepped along its momentum, made orthogonal; AdamW steps every other parameter.

For a matrix W with gradient G, momentum M, learning rate η and weight decay λ (Jordan et al. 2024;
the factor 0.2·√max is Moonlight's, arXiv 2502.16982, so that one η serves Muon and AdamW):

    M ← μ·M + G
    W ← W − η·(0.2·√max(rows, columns)·orthogonal(G + μ·M) + λ·W)

``weights/matrices.py`` says what a matrix is. A matrix is made orthogonal whole. Its elements may be
spread over ranks in two ways:

- Each tensor rank holds a shard. The shards are gathered; every tensor rank computes the whole
  matrix and keeps its own shard.
- Under ``optimizer.distributed`` each data-parallel rank steps a range of the flattened shards, and
  keeps the range's momentum. Ranks whose ranges meet in one shard exchange them first. A rank
  without a part of a shard computes nothing for it.

Every rank of a data-parallel and of a tensor group runs the same collectives in the same order, in
ghost steps too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.distributed.platform import HOST  # before megatron.core
from megatron_rl.distributed.topology import Topology
from megatron_rl.weights.entry import Entry, Layout
from megatron_rl.weights.mapping import stage_entries
from megatron_rl.weights.matrices import flat_rows, is_matrix, matrices
from megatron_rl.weights.model_shape import ModelShape

from megatron.core.distributed import DistributedDataParallel  # isort: skip
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # isort: skip

MOMENTUM = "momentum_buffer"
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x³ and x⁵; Jordan et al. 2024
UPDATE_SCALE = 0.2  # AdamW's usual root mean square of an update; arXiv 2502.16982, section 2.2


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return about U·Vᵀ of ``matrix`` = U·S·Vᵀ, by Newton–Schulz iterations; zeros for a matrix of zeros."""
    linear, cubic, quintic = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t() if tall else matrix
    x = x / (torch.linalg.vector_norm(x) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.t()
        x = linear * x + (cubic * gram + quintic * gram @ gram) @ x
    return x.t() if tall else x


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """Describes a parameter that holds matrices, and this rank's part of it.

    entry: how the matrices lie in the parameter.
    size: the shape of the parameter, a tensor rank's shard.
    main: the float32 tensor that this rank steps; None if it steps no part of the parameter.
    group_index: the number of ``main``'s parameter group.
    ranges: (global rank, start, stop) of each data-parallel rank's range of the flattened parameter,
        if several ranks step parts of it; else ().
    data_group: the ranks of ``ranges``; None if there are none.
    own: the range of the flattened parameter that ``main`` covers.
    """

    entry: Entry
    size: torch.Size
    main: torch.Tensor | None
    group_index: int
    own: slice
    ranges: tuple[tuple[int, int, int], ...] = ()
    data_group: dist.ProcessGroup | None = None


class Muon:
    """Steps matrices by Muon, and the other parameters by the AdamW that it replaces in Megatron-Core's optimizer.

    Parameter groups and state are AdamW's own objects, so that the learning rate's schedule, the
    offload and checkpoints find both kinds of state in one place.
    """

    def __init__(
        self,
        adam: torch.optim.Optimizer,
        placed: Sequence[Placed],
        parameters: Sequence[torch.nn.Parameter],
        *,
        momentum: float,
        shape: ModelShape,
        topology: Topology,
    ) -> None:
        """Keep what a step needs.

        adam: the optimizer to replace; its groups hold the matrices too.
        placed: where the matrices lie, in an order that is the same on every rank of their groups.
        parameters: the model's parameters that ``placed`` describes.
        momentum: μ.
        """
        self.adam, self.placed, self.momentum = adam, placed, momentum
        self.shape, self.topology = shape, topology
        self._matrices = {id(parameter) for parameter in parameters}

    @property
    def param_groups(self) -> list[dict]:
        return self.adam.param_groups

    @property
    def state(self) -> Mapping[torch.Tensor, dict]:
        return self.adam.state

    def moments_of(self, parameter: torch.nn.Parameter) -> tuple[str, ...]:
        """Return the kinds of moments that Muon keeps of a parameter of the model; () if AdamW steps it."""
        return (MOMENTUM,) if id(parameter) in self._matrices else ()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.adam.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> None:
        """Step all parameters. A collective over tensor groups, and over data-parallel groups that share matrices."""
        mains = [placed.main for placed in self.placed if placed.main is not None]
        gradients = [main.grad for main in mains]
        for main in mains:
            main.grad = None  # so AdamW passes over it
        self.adam.step()
        for main, gradient in zip(mains, gradients, strict=True):
            main.grad = gradient
        for placed in self.placed:
            self._step_parameter(placed)

    def _step_parameter(self, placed: Placed) -> None:
        main = placed.main
        ahead = None if main is None else self._advance(main)
        whole = _exchange(placed, ahead)
        if main is None or whole is None:
            return
        group = self.param_groups[placed.group_index]
        update = self._orthogonal_shard(placed.entry, whole).flatten()[placed.own]
        main.mul_(1 - group["lr"] * group["weight_decay"])
        main.add_(update.view(main.shape), alpha=-group["lr"])

    def _advance(self, main: torch.Tensor) -> torch.Tensor:
        """Add the gradient to the momentum, and return Nesterov's: gradient + μ · momentum."""
        state = self.state[main]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(main)
        state[MOMENTUM].mul_(self.momentum).add_(main.grad)
        return main.grad.add(state[MOMENTUM], alpha=self.momentum)

    def _orthogonal_shard(self, entry: Entry, shard: torch.Tensor) -> torch.Tensor:
        """Return this tensor rank's shard of the scaled orthogonal matrices. A collective over the tensor group.

        shard: this rank's shard of the parameter's momentum.
        """
        topology = self.topology
        group, rank, ranks = topology.tensor_group, topology.tensor_rank, topology.tensor_size
        if entry.expert is not None:
            group, rank = topology.expert_tensor_group, topology.expert_tensor_rank
            ranks = topology.expert_tensor_size
        if entry.layout is Layout.REPLICATED or ranks == 1:
            shards, rank = shard[None], 0
        else:
            shards = shard.new_empty(ranks, *shard.shape)
            dist.all_gather(list(shards.unbind()), shard.contiguous(), group=group)
        result = torch.empty_like(shards)
        for read, written in zip(matrices(entry, self.shape, shards), matrices(entry, self.shape, result), strict=True):
            matrix = flat_rows(entry, read)
            scaled = orthogonal(matrix) * (UPDATE_SCALE * max(matrix.shape) ** 0.5)
            written.copy_(scaled.reshape(written.shape))
        return result[rank]


def _exchange(placed: Placed, ahead: torch.Tensor | None) -> torch.Tensor | None:
    """Return the whole shard, made of all data-parallel ranks' ranges; None if this rank steps no part of it.

    A collective over ``placed.data_group``, if there is one.

    ahead: this rank's range.
    """
    if placed.data_group is None:
        return None if ahead is None else ahead.view(placed.size)
    whole = torch.empty(placed.size.numel(), dtype=torch.float32, device=HOST.device)
    if ahead is not None:
        whole[placed.own] = ahead.flatten()
    for rank, start, stop in placed.ranges:
        dist.broadcast(whole[start:stop], rank, group=placed.data_group)
    return None if ahead is None else whole.view(placed.size)


def use_muon(
    optimizer, chunks: Sequence[DistributedDataParallel], shape: ModelShape, topology: Topology, *, momentum: float
) -> None:
    """Replace AdamW by Muon in Megatron-Core's chained optimizer. A collective.

    optimizer: what get_megatron_optimizer returned.
    momentum: μ, ``optimizer.momentum``.
    """
    found = list(_parameters(chunks, shape, topology))
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        held = {id(p) for p in _held_parameters(part)}
        own = [(p, entry) for p, entry in found if id(p) in held]
        placed = _sharded(part, own) if isinstance(part, DistributedOptimizer) else list(_whole(part, own))
        part.optimizer = Muon(
            part.optimizer, placed, [p for p, _ in own], momentum=momentum, shape=shape, topology=topology
        )


def _parameters(
    chunks: Sequence[DistributedDataParallel], shape: ModelShape, topology: Topology
) -> Iterator[tuple[torch.nn.Parameter, Entry]]:
    """Yield (parameter, its Entry) of each parameter that holds matrices, in the order of the stages' entries."""
    for number, chunk in enumerate(chunks):
        named = dict(chunk.module.named_parameters())
        for entry in stage_entries(
            shape, number * topology.pipeline_size + topology.pipeline_rank, topology.expert_size
        ):
            if is_matrix(entry, shape):
                yield named[entry.megatron], entry


def _held_parameters(part) -> Iterator[torch.nn.Parameter]:
    """Return the model's parameters that one of Megatron-Core's optimizers steps, on any data-parallel rank."""
    if isinstance(part, DistributedOptimizer):
        return itertools.chain.from_iterable(buffer.param_index_map for buffer in part.buffers)
    if hasattr(part, "float16_groups"):
        return itertools.chain(*part.float16_groups, *part.fp32_from_fp32_groups)
    return iter(part.get_parameters())


def _whole(part, own: Sequence[tuple[torch.nn.Parameter, Entry]]) -> Iterator[Placed]:
    """Yield where the matrices lie if every data-parallel rank steps all of them."""
    group_of = {id(p): i for i, group in enumerate(part.optimizer.param_groups) for p in group["params"]}
    for parameter, entry in own:
        main = parameter if id(parameter) in group_of else parameter.main_param
        everything = slice(0, parameter.numel())
        yield Placed(entry=entry, size=parameter.shape, main=main, group_index=group_of[id(main)], own=everything)


def _sharded(part: DistributedOptimizer, own: Sequence[tuple[torch.nn.Parameter, Entry]]) -> list[Placed]:
    """Return where the matrices lie if each data-parallel rank steps a range. A collective over these ranks."""
    group, spans = part.data_parallel_group, []
    for parameter, _ in own:
        held = parameter in part.model_param_group_index_map
        span = part._get_model_param_range_map(parameter)["param"] if held else None
        spans.append((span.start, span.end) if span else (0, 0))
    of_ranks: list = [None] * group.size()
    dist.all_gather_object(of_ranks, spans, group=group)
    ranks = dist.get_process_group_ranks(group)
    placed = []
    for number, (parameter, entry) in enumerate(own):
        holders = [
            (rank, *of[number]) for rank, of in zip(ranks, of_ranks, strict=True) if of[number][1] > of[number][0]
        ]
        shared = len(holders) > 1
        main, group_index = None, -1
        if spans[number][1] > spans[number][0]:
            group_index, order = part.model_param_group_index_map[parameter]
            main = part.optimizer.param_groups[group_index]["params"][order]
        placed.append(
            Placed(
                entry=entry,
                size=parameter.shape,
                main=main,
                group_index=group_index,
                own=slice(*spans[number]),
                ranges=tuple(holders) if shared else (),
                data_group=group if shared else None,
            )
        )
    return placed

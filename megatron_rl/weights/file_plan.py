"""The plan of which rank writes which tensors to which files of an export, so that all ranks write at once.

Each parameter has one owner, a rank of its pipeline stage that writes all Hugging Face tensors of
the parameter. The owner collects the parameter's shards from the ranks of one group: its tensor
ranks, or the ranks that share an expert. The owner of a stack (one tensor of all experts of a
layer) collects from all expert-parallel ranks. Data-parallel replicas hold equal shards, and divide
the parameters among themselves.

Invariants (tests/unit/weights/test_file_plan.py):

1. Every tensor of the model is in exactly one file, and every file has one owner.
2. A file has at most ``FileSizes.most_bytes``, unless it is one tensor.
3. The plan follows from shape, sizes, dtype and limits, so that all ranks make equal plans.
4. The bytes that a stage's ranks write differ by at most the stage's largest parameter, unless
   ``FileSizes.least_bytes`` leaves some ranks without work.
5. A parameter that is whole on every tensor rank is sent at most once: to its owner, by the first
   of these ranks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_rl.weights.entry import Entry, Layout
from megatron_rl.weights.families.register import stacking
from megatron_rl.weights.mapping import TIED_HEAD, hf_size, shard_size, stage_entries
from megatron_rl.weights.model_shape import ModelShape
from megatron_rl.weights.shards import Planned, cut_shards, file_name


class Sizes(Protocol):
    """Declares the attributes that the plan reads: the numbers of ranks in the world and in each parallel group.

    A ``Topology`` has them, and so have the simulator's ``Degrees``.
    """

    world_size: int
    tensor_size: int
    pipeline_size: int
    expert_size: int
    expert_tensor_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSizes:
    """Holds bounds for the sizes of an export's files.

    most_bytes: the most bytes of a file; a larger tensor has its own file.
    least_bytes: the least bytes that a rank should write; if a stage has too few bytes for all its
        ranks, fewer ranks write.
    """

    most_bytes: int = 5 * 10**9
    least_bytes: int = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Describes one Megatron parameter whose shards are collected by its owner, the rank that writes it.

    entry: the parameter's ``Entry``. Hugging Face names of an expert's entry hold ``{expert}``, which
        ``Entry.held_by`` replaces by the expert's number among all experts.
    pipeline_rank, chunk: the pipeline rank and the model chunk that the parameter belongs to.
    expert_rank: the expert-parallel rank that holds the expert; None for a parameter outside the
        experts.
    size: the shape of one shard.
    num_shards: the number of shards that the owner needs; 1 if every rank holds the whole
        parameter.
    dtype: the dtype of the shards and of the tensors.
    """

    entry: Entry
    pipeline_rank: int
    chunk: int
    expert_rank: int | None
    size: tuple[int, ...]
    num_shards: int
    dtype: torch.dtype

    def sources(self, owner: int, sizes: Sizes) -> range:
        """Return the global ranks that hold the shards of this parameter, in the shards' order.

        The ranks are in the data-parallel replica of the rank ``owner``.
        """
        span = sizes.tensor_size if self.expert_rank is None else sizes.expert_size * sizes.expert_tensor_size
        first = owner // span * span + (self.expert_rank or 0) * sizes.expert_tensor_size
        return range(first, first + self.num_shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Holds tensors that one rank must write, and the pieces (Megatron parameters) that they are made of.

    pieces: the pieces, in the order in which their tensors are written.
    tensors: the Hugging Face tensors.
    num_bytes: the bytes of the tensors.

    Examples: q, k and v of a layer are three tensors of one piece; a stack of 8 experts' down_proj
    is one tensor of 8 pieces.
    """

    pieces: tuple[Piece, ...]
    tensors: tuple[Planned, ...]
    num_bytes: int

    @property
    def of_experts(self) -> bool:
        return self.pieces[0].expert_rank is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """Describes a file of an export: its name, the rank that writes it, and its tensors in order.

    Example: ``PlannedFile(name="model-00002-of-00004.safetensors", owner=1, tensors=(…,))``.
    """

    name: str
    owner: int
    tensors: tuple[Planned, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the file's tensors, without the header."""
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """Holds the files that each rank writes, and the pieces (Megatron parameters) that it collects for them.

    dtype: the tensors' dtype, except for frozen buffers, which are float32.
    files: all ranks' files, in the order of the numbers in their names.
    pieces: {rank: the pieces that the rank collects} of the ranks that write. Each rank's pieces are
        in the order in which it writes their tensors; those of experts come last.
    """

    dtype: torch.dtype
    files: tuple[PlannedFile, ...]
    pieces: dict[int, tuple[Piece, ...]]

    def of(self, rank: int) -> list[tuple[str, tuple[Planned, ...]]]:
        """Return (file name, tensors of the file) for each file that ``rank`` writes."""
        return [(file.name, file.tensors) for file in self.files if file.owner == rank]

    def collected(self, rank: int, *, of_experts: bool) -> tuple[Piece, ...]:
        """Return the pieces (parameters) that ``rank`` collects: of experts if ``of_experts``, else all others."""
        return tuple(x for x in self.pieces.get(rank, ()) if (x.expert_rank is not None) == of_experts)


def plan_files(shape: ModelShape, sizes: Sizes, dtype: torch.dtype, limits: FileSizes) -> FilePlan:
    """Return the plan that divides a model's tensors among the ranks, and each rank's tensors among files.

    sizes: the numbers of ranks.
    dtype: the dtype of all tensors except frozen buffers.
    limits: the bounds for the sizes of files.
    """
    if limits.most_bytes < 1 or limits.least_bytes < 1:
        raise ValueError(f"{limits} must be at least 1 byte each")
    shares: dict[int, list[Unit]] = {}
    for pipeline_rank in range(sizes.pipeline_size):
        units = _units(shape, sizes, pipeline_rank, dtype)
        shares |= {rank: own for rank, own in _shared_out(units, sizes, pipeline_rank, limits).items() if own}
    cut = {
        rank: cut_shards([tensor for unit in own for tensor in unit.tensors], limits.most_bytes)
        for rank, own in sorted(shares.items())
    }
    owned = [(rank, tuple(tensors)) for rank, files in cut.items() for tensors in files]
    return FilePlan(
        dtype=dtype,
        files=tuple(
            PlannedFile(name=file_name(i, len(owned)), owner=rank, tensors=tensors)
            for i, (rank, tensors) in enumerate(owned)
        ),
        pieces={rank: tuple(piece for unit in shares[rank] for piece in unit.pieces) for rank in cut},
    )


def _units(shape: ModelShape, sizes: Sizes, pipeline_rank: int, dtype: torch.dtype) -> list[Unit]:
    """Return the units of one pipeline rank (``Unit``: tensors that one rank must write together).

    They come chunk after chunk and layer after layer; stacks of experts come last.
    """
    stacked = stacking(shape.family) is not None
    units: list[Unit] = []
    stacks: dict[str, list[tuple[Piece, list[Planned]]]] = {}
    for stage in range(pipeline_rank, shape.num_stages, sizes.pipeline_size):
        for piece, tensors, num_bytes in _pieces(shape, sizes, stage, dtype):
            if stacked and (stack := _stack_of(tensors[0].name, shape.family)) is not None:
                stacks.setdefault(stack, []).append((piece, tensors))
            else:
                units.append(Unit(pieces=(piece,), tensors=tuple(tensors), num_bytes=num_bytes))
    for parts in stacks.values():
        from megatron_rl.weights.stacked import joined_plan

        # the order of the numbers among all experts
        parts.sort(key=lambda part: (part[0].expert_rank, part[0].entry.expert))
        joined = joined_plan([tensor for _, tensors in parts for tensor in tensors], shape.family)
        num_bytes = sum(tensor.num_bytes for tensor in joined)
        units.append(Unit(pieces=tuple(piece for piece, _ in parts), tensors=tuple(joined), num_bytes=num_bytes))
    return units


def _stack_of(name: str, family: str) -> str | None:
    from megatron_rl.weights.stacked import slice_of

    place = slice_of(name, stacking(family))
    return None if place is None else place.stack


def _pieces(
    shape: ModelShape, sizes: Sizes, stage: int, dtype: torch.dtype
) -> Iterator[tuple[Piece, list[Planned], int]]:
    """Yield (piece, its Hugging Face tensors, their bytes) for each Megatron parameter of a pipeline stage.

    An expert's parameter comes once for every expert-parallel rank.
    """
    chunk, pipeline_rank = divmod(stage, sizes.pipeline_size)
    for entry in stage_entries(shape, stage, sizes.expert_size):
        if entry == TIED_HEAD:
            continue
        of_expert = entry.expert is not None
        ranks = sizes.expert_tensor_size if of_expert else sizes.tensor_size
        kind = torch.float32 if entry.frozen else dtype
        whole = [hf_size(shape, name) for name in entry.hf]
        num_bytes = sum(map(math.prod, whole)) * kind.itemsize
        facts = dict(
            entry=entry,
            pipeline_rank=pipeline_rank,
            chunk=chunk,
            size=shard_size(entry, shape, ranks),
            num_shards=1 if entry.layout is Layout.REPLICATED else ranks,
            dtype=kind,
        )
        for expert_rank in range(sizes.expert_size) if of_expert else (None,):
            names = entry.held_by(expert_rank or 0, shape, sizes.expert_size).hf if of_expert else entry.hf
            tensors = [Planned(name=name, shape=x, dtype=kind) for name, x in zip(names, whole, strict=True)]
            yield Piece(expert_rank=expert_rank, **facts), tensors, num_bytes


def _shared_out(units: Sequence[Unit], sizes: Sizes, pipeline_rank: int, limits: FileSizes) -> dict[int, list[Unit]]:
    """Return {rank: the units that it writes} for the ranks with this pipeline rank, with nearly equal bytes each.

    A unit is tensors that one rank must write together. Among units that the same ranks may write,
    the largest is given first, to the rank with the fewest bytes so far. A stack (one tensor of all
    experts) goes to any of the ranks. The tensors of a single expert go to a rank that holds the
    expert or a part of it. A parameter that all tensor ranks hold whole goes to the first of them.
    """
    num_ranks = sizes.world_size // sizes.pipeline_size
    first = pipeline_rank * num_ranks
    num_bytes = sum(unit.num_bytes for unit in units)
    owners = _spread(range(first, first + num_ranks), num_bytes, limits)
    loads = dict.fromkeys(range(first, first + num_ranks), 0)
    chosen: dict[int, int] = {}

    def give(numbers: list[int], ranks: Sequence[int]) -> None:
        heap = [(loads[rank], rank) for rank in ranks]
        heapq.heapify(heap)
        for number in sorted(numbers, key=lambda x: -units[x].num_bytes):
            load, rank = heap[0]
            chosen[number] = rank
            heapq.heapreplace(heap, (load + units[number].num_bytes, rank))
        loads.update((rank, load) for load, rank in heap)

    kinds: dict[int | str, list[int]] = {}
    for number, unit in enumerate(units):
        kinds.setdefault(_kind(unit), []).append(number)
    give(kinds.pop("copy", []), [rank for rank in owners if rank % sizes.tensor_size == 0])
    give(kinds.pop("any", []), owners)
    # Last, since their many small tensors level what the large ones left uneven.
    for expert_rank, numbers in kinds.items():
        sharing = [x for x in loads if x // sizes.expert_tensor_size % sizes.expert_size == expert_rank]
        give(numbers, _spread(sharing, sum(units[x].num_bytes for x in numbers), limits))
    shares: dict[int, list[Unit]] = {rank: [] for rank in loads}
    for of_experts in (False, True):
        # largest first, so that rounds are even
        for number, unit in sorted(enumerate(units), key=lambda x: -x[1].num_bytes):
            if unit.of_experts == of_experts:
                shares[chosen[number]].append(unit)
    return shares


def _kind(unit: Unit) -> int | str:
    if len(unit.pieces) > 1:
        return "any"
    (piece,) = unit.pieces
    if piece.expert_rank is not None:
        return piece.expert_rank
    return "copy" if piece.num_shards == 1 else "any"


def _spread(ranks: Sequence[int], num_bytes: int, limits: FileSizes) -> list[int]:
    """Return the ranks, some or all of ``ranks``, that write ``num_bytes`` together.

    If all would write less than ``limits.least_bytes`` each, fewer ranks write, at least one. They
    are chosen at equal distances in ``ranks``, so that several hosts write.
    """
    count = min(len(ranks), max(1, num_bytes // limits.least_bytes))
    return [ranks[i * len(ranks) // count] for i in range(count)]

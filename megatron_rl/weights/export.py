"""The import of Hugging Face weights into each rank's shard, and the export from any degrees of TP, PP and EP."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import ConfigError
from megatron_rl.weights.entry import ROUTER_BIAS, Entry, Layout
from megatron_rl.weights.mapping import (
    ADAPTER,
    TIED_HEAD,
    hf_parts,
    hf_size,
    is_copied,
    laid_out,
    load_shard,
    shard_size,
    stage_entries,
)
from megatron_rl.weights.model_shape import ModelShape
from megatron_rl.weights.reader import WeightReader, check_finite, whole_tensors

BUCKET_BYTES = 512 * 2**20
StageEntries = Callable[[ModelShape, int, int], Iterator[Entry]]
"""Maps (shape, stage, number of expert-parallel ranks) to an iterator of the stage's entries, equal on all ranks."""
TakesShard = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes (a parameter of this rank, its shard of the Hugging Face tensors); the shard may be in host memory."""


@torch.no_grad()
def load_weights(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    topology: Topology,
    reader: WeightReader,
    *,
    halves: WeightReader | None = None,
    also: TakesShard | None = None,
) -> None:
    """Copy this rank's shards of the Hugging Face tensors into the parameters and frozen buffers of its model chunks.

    Adapters (LoRA) are left as they are.

    Raises ConfigError if a tensor is missing, has another shape or holds a NaN. Raises RuntimeError
    if a parameter has no tensor, or a tensor no parameter.

    chunks: this rank's model chunks, in order.
    reader: gives slices of the Hugging Face tensors.
    halves: gives the slices of bfloat16 parameters in place of ``reader``; its numbers round to those
        of ``reader``.
    also: takes each shard as it was read, which may be finer than the parameter.
    """
    for number, chunk in enumerate(chunks):
        stage = number * topology.pipeline_size + topology.pipeline_rank
        _load_chunk(chunk, stage, shape, topology, reader, halves or reader, also)


def _load_chunk(
    chunk: torch.nn.Module,
    stage: int,
    shape: ModelShape,
    topology: Topology,
    reader: WeightReader,
    halves: WeightReader,
    also: TakesShard | None,
) -> None:
    parameters = named_weights(chunk)
    for stage_entry in stage_entries(shape, stage, topology.expert_size):
        entry = stage_entry.held_by(topology.expert_rank, shape, topology.expert_size)
        for name in entry.hf:
            if reader.size(name) != hf_size(shape, name):
                raise ConfigError(
                    f"{name} has shape {reader.size(name)} and the config asks for {hf_size(shape, name)}"
                )
        if entry.megatron not in parameters:
            raise RuntimeError(
                f"the model has no parameter {entry.megatron} for {entry.hf}; its layer spec is {shape.layer_spec}"
            )
        rank, ranks = topology.tensor_rank, topology.tensor_size
        if entry.expert is not None:
            rank, ranks = topology.expert_tensor_rank, topology.expert_tensor_size
        parameter = parameters.pop(entry.megatron)
        given = reader if parameter.dtype == torch.float32 else halves
        shard = load_shard(entry, shape, given.read, rank, ranks)
        parameter.copy_(shard)
        if also is not None:
            also(parameter, shard)
        check_finite(parameter, functools.partial(whole_tensors, entry, shape, reader), "set model.dtype=float32")
    if unfilled := sorted(name for name in parameters if f"{ADAPTER}." not in name):
        raise RuntimeError(f"parameters that no Hugging Face tensor fills: {unfilled}; weights/mapping.py lacks them")


def named_weights(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return {name: tensor} of a chunk's parameters, and of the buffers that checkpoints hold (``Entry.frozen``)."""
    buffers = {name: buffer for name, buffer in chunk.named_buffers() if name.endswith(ROUTER_BIAS)}
    return dict(chunk.named_parameters()) | buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Describes parameters of one pipeline stage whose shards are gathered in one buffer.

    stage: the pipeline stage.
    entries: the ``Entry`` of each parameter.
    sizes: for each parameter, the shape of one rank's shard.
    ranks: the number of tensor ranks (for experts, of expert tensor ranks) that each parameter is
        split over.
    holders: the number of ranks whose shards are gathered: ``ranks``, or for experts ``ranks`` times
        the number of expert-parallel ranks.
    gathered_elements: the number of elements of all holders' shards; 0 if nothing is gathered.
    copied_elements: the number of elements of the largest Hugging Face tensor that must be copied,
        since the shards do not hold its elements in order; 0 if there is none.

    Example: o_proj [64, 64] at TP 2, alone: one size (64, 32), 2 holders, 4096 elements gathered
    and 4096 copied.
    """

    stage: int
    entries: tuple[Entry, ...]
    sizes: tuple[tuple[int, ...], ...]
    ranks: int
    holders: int
    gathered_elements: int
    copied_elements: int

    @property
    def of_experts(self) -> bool:
        return self.entries[0].expert is not None

    @property
    def frozen(self) -> bool:
        return self.entries[0].frozen

    @property
    def elements(self) -> int:
        return self.gathered_elements + self.copied_elements

    def takes(self, other: Bucket) -> bool:
        """Return whether the parameters of this bucket and of ``other`` can be gathered together.

        Both buckets must be of one stage, and of one kind (experts or not, frozen or not). An
        embedding or LM head is never joined with others, so that it is exported without a copy.
        """
        alone = any(entry.layout is Layout.ROWS for entry in self.entries + other.entries)
        kinds = ((x.stage, x.of_experts, x.frozen) for x in (self, other))
        return len(set(kinds)) == 1 and not alone

    def joined(self, other: Bucket) -> Bucket:
        return replace(
            self,
            entries=self.entries + other.entries,
            sizes=self.sizes + other.sizes,
            gathered_elements=self.gathered_elements + other.gathered_elements,
            copied_elements=max(self.copied_elements, other.copied_elements),
        )


def _bucket_of(stage: int, entry: Entry, shape: ModelShape, topology: Topology) -> Bucket:
    ranks, peers = topology.tensor_size, 1
    if entry.expert is not None:
        ranks, peers = topology.expert_tensor_size, topology.expert_size
    size = shard_size(entry, shape, ranks)
    travels = ranks * peers * topology.pipeline_size > 1
    copied = is_copied(entry.layout, ranks)
    return Bucket(
        stage=stage,
        entries=(entry,),
        sizes=(size,),
        ranks=ranks,
        holders=ranks * peers,
        gathered_elements=ranks * peers * math.prod(size) if travels else 0,
        copied_elements=max(math.prod(hf_size(shape, name)) for name in entry.hf) if copied else 0,
    )


def cut_buckets(
    shape: ModelShape, topology: Topology, most_elements: int, entries: StageEntries = stage_entries
) -> list[Bucket]:
    """Return buckets that hold every entry of every stage once, in the order of the stages.

    The buckets follow from the config alone, so that all ranks have equal ones. In each bucket
    ``gathered_elements + copied_elements`` is at most ``most_elements``; a larger entry has a
    bucket of its own.

    entries: called with (shape, stage, number of expert-parallel ranks); returns the stage's
        entries.
    """
    buckets: list[Bucket] = []
    for stage in range(shape.num_stages):
        for entry in entries(shape, stage, topology.expert_size):
            if entry == TIED_HEAD:
                continue
            last, added = buckets[-1] if buckets else None, _bucket_of(stage, entry, shape, topology)
            if last is not None and last.takes(added) and (both := last.joined(added)).elements <= most_elements:
                buckets[-1] = both
            else:
                buckets.append(added)
    return buckets


@torch.no_grad()
def export_weights(
    chunks: Sequence[Mapping[str, torch.Tensor]],
    shape: ModelShape,
    topology: Topology,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    entries: StageEntries = stage_entries,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, whole tensor) of every weight, on every rank.

    A collective over the model-parallel group and the experts' group. One bucket after the other is
    broadcast over the pipeline ranks and gathered over the ranks that hold its shards. All ranks
    must run the iterator to its end, with equal bucket_bytes. The order of the tensors does not
    depend on bucket_bytes.

    A tensor is valid until the next is asked for: copy it out before, and do not write to it. It is
    a view of the export's memory, or of the parameter itself if nothing is gathered.

    chunks: for each model chunk, {Megatron name: this rank's shard} of the parameters and frozen
        buffers, or tensors of equal shapes (gradients). A pending gather of parameters over
        data-parallel ranks must have ended before (backend.export waits for it).
    bucket_bytes: the most memory allocated beside the chunks: for all shards of a bucket, and for
        one Hugging Face tensor copied from the shards. An entry that needs more gets more.
    entries: called with (shape, stage, number of expert-parallel ranks); returns the stage's
        entries to export. It gives the model's parameters, or LoRA's
        (``mapping.adapter_entries``).
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes} must be at least 1; 1 is an entry at a time")
    example = next(iter(chunks[0].values()))
    buckets = cut_buckets(shape, topology, bucket_bytes // example.element_size(), entries)
    dtypes = [torch.float32 if bucket.frozen else example.dtype for bucket in buckets]
    num_bytes = max(bucket.elements * dtype.itemsize for bucket, dtype in zip(buckets, dtypes, strict=True))
    whole = torch.empty(-(-num_bytes // 8) * 8, dtype=torch.uint8, device=example.device)
    for bucket, dtype in zip(buckets, dtypes, strict=True):
        memory = whole.view(dtype)
        gathered = _gather(bucket, chunks, memory, topology)
        spare = memory[bucket.gathered_elements :]
        for entry, of_holders in zip(bucket.entries, gathered, strict=True):
            # The expert group counts an expert's tensor ranks first: rows e·ranks to (e + 1)·ranks belong to
            # expert-parallel rank e.
            for expert_rank, shards in enumerate(of_holders.split(bucket.ranks)):
                for name, parts in hf_parts(entry.held_by(expert_rank, shape, topology.expert_size), shape, shards):
                    yield name, laid_out(parts, hf_size(shape, name), spare)


def _gather(
    bucket: Bucket, chunks: Sequence[Mapping[str, torch.Tensor]], memory: torch.Tensor, topology: Topology
) -> Iterator[torch.Tensor]:
    """Return an iterator that yields, for each entry of the bucket, all ranks' shards, [bucket.holders, *shard].

    The shards lie in ``memory``. If nothing has to be gathered, the iterator yields each parameter
    itself, as [1, *shard].

    chunks: as in ``export_weights``.
    memory: a vector of at least ``bucket.gathered_elements`` elements.
    """
    chunk, owner = divmod(bucket.stage, topology.pipeline_size)
    if not bucket.gathered_elements:
        return (chunks[chunk][entry.megatron].detach()[None] for entry in bucket.entries)
    group = topology.expert_group if bucket.of_experts else topology.tensor_group
    rows = memory[: bucket.gathered_elements].view(bucket.holders, -1)
    columns = rows.split([math.prod(size) for size in bucket.sizes], dim=1)
    shards = [column.view(bucket.holders, *size) for column, size in zip(columns, bucket.sizes, strict=True)]
    own_row = dist.get_rank(group)
    # The stage's pipeline rank copies its shards into its own row, and hands the row to the other pipeline ranks.
    if owner == topology.pipeline_rank:
        for entry, size, shard in zip(bucket.entries, bucket.sizes, shards, strict=True):
            parameter = chunks[chunk][entry.megatron]
            assert (parameter.dtype, tuple(parameter.shape)) == (memory.dtype, size), (
                f"{entry.megatron} is {parameter.dtype} {tuple(parameter.shape)}, and all ranks await {memory.dtype} "
                f"{size}"
            )
            shard[own_row].copy_(parameter)
    if topology.pipeline_size > 1:  # before the gather, so that only one shard crosses the pipeline
        dist.broadcast(
            rows[own_row], dist.get_global_rank(topology.pipeline_group, owner), group=topology.pipeline_group
        )
    # One broadcast per holder moves the bytes of an all-gather. gloo's all-gather holds a second buffer of the whole
    # output (measured, torch 2.13: 130 MB more for an output of 128 MB; broadcasts 0.2 MB).
    if bucket.holders > 1:
        broadcasts = [
            dist.broadcast(row, rank, group=group, async_op=True)
            for row, rank in zip(rows, dist.get_process_group_ranks(group), strict=True)
        ]
        for work in broadcasts:
            work.wait()
    return iter(shards)

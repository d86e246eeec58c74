"""The estimated cost of loading and exporting a model's weights: bytes, reads, files, messages and seconds.

It is computed from a model's shape and degrees of parallelism alone. What each rank reads and writes
comes from weights/mapping.py and weights/file_plan.py, which plan the real load and export. Bytes
are the tensors' bytes; headers of files are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_rl.simulator.degrees import Degrees
from megatron_rl.weights.entry import Entry, Layout
from megatron_rl.weights.file_plan import FilePlan
from megatron_rl.weights.mapping import hf_size, shard_reads, stage_entries
from megatron_rl.weights.model_shape import ModelShape

GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles:
    """Counts what one rank reads in a load, and what it writes and sends in an export.

    read_bytes, num_reads: the size and number of the slices of weight files that it reads.
    written_bytes, num_files: the size and number of the files that it writes.
    sent_bytes, num_messages: the size and number of the tensors that it sends to the ranks that
        write them.
    """

    read_bytes: int
    num_reads: int
    written_bytes: int
    num_files: int
    sent_bytes: int
    num_messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Counts what a load and an export of a model's weights read, write and send.

    ranks: the counts of each rank, in the order of global ranks.
    read_by_host: the bytes that the ranks of each host read from storage. Bytes that several of
        them read count once, as if the host's page cache held them.
    num_files, largest_file_bytes: the number of files of an export, and the largest one's size.

    Example: a model of 16 bytes with DP=2 on one host. Each rank reads 16 bytes, the host reads 16,
    and one rank writes 16.
    """

    model_bytes: int
    num_tensors: int
    ranks: tuple[RankFiles, ...]
    read_by_host: tuple[int, ...]
    num_files: int
    largest_file_bytes: int
    ranks_per_host: int

    @property
    def written_by_host(self) -> tuple[int, ...]:
        written = [rank.written_bytes for rank in self.ranks]
        return tuple(sum(written[i : i + self.ranks_per_host]) for i in range(0, len(written), self.ranks_per_host))

    def load_s(self, bytes_per_s: float) -> float:
        """Return the seconds of a load if each host reads ``bytes_per_s`` from storage."""
        return max(self.read_by_host) / bytes_per_s

    def export_s(self, bytes_per_s: float) -> float:
        """Return the seconds of an export if each host writes ``bytes_per_s`` to storage."""
        return max(self.written_by_host) / bytes_per_s

    def figures(self, bytes_per_s: float) -> dict[str, Any]:
        """Return {name: number}: the seconds of load and export, and the most that any rank or host reads and writes.

        bytes_per_s: the bandwidth between a host and storage.
        """
        most = {
            f"most_{name}": max(getattr(rank, name) for rank in self.ranks)
            for name in ("read_bytes", "num_reads", "written_bytes", "num_files", "sent_bytes", "num_messages")
        }
        return {
            "model_bytes": self.model_bytes,
            "tensors": self.num_tensors,
            **most,
            "read_bytes_of_all_ranks": sum(rank.read_bytes for rank in self.ranks),
            "most_read_bytes_of_a_host": max(self.read_by_host),
            "most_written_bytes_of_a_host": max(self.written_by_host),
            "files": self.num_files,
            "largest_file_bytes": self.largest_file_bytes,
            "host_bytes_per_s": bytes_per_s,
            "load_s": self.load_s(bytes_per_s),
            "export_s": self.export_s(bytes_per_s),
            "export_by_one_host_s": self.model_bytes / bytes_per_s,
        }


def count_model_files(shape: ModelShape, degrees: Degrees, plan: FilePlan, ranks_per_host: int) -> ModelFiles:
    """Return how many bytes each rank and host reads, writes and sends to load and to export a model.

    degrees: the degrees of parallelism.
    plan: the plan of the export. The files to load are assumed to have the same dtype.
    ranks_per_host: the number of ranks on each host.
    """
    # Each rank's part.
    sent = _sent(plan, degrees)
    reads = _Reads(shape, degrees, plan.dtype)
    ranks = []
    written: dict[int, list[int]] = {}
    for file in plan.files:
        written.setdefault(file.owner, []).append(file.num_bytes)
    for rank in range(degrees.world_size):
        own = written.get(rank, [])
        read_bytes, num_reads = reads.of_rank(rank)
        sent_bytes, num_messages = sent[rank]
        ranks.append(
            RankFiles(
                read_bytes=read_bytes,
                num_reads=num_reads,
                written_bytes=sum(own),
                num_files=len(own),
                sent_bytes=sent_bytes,
                num_messages=num_messages,
            )
        )
    # The sums over hosts and files.
    hosts = [range(i, min(i + ranks_per_host, len(ranks))) for i in range(0, len(ranks), ranks_per_host)]
    return ModelFiles(
        model_bytes=sum(file.num_bytes for file in plan.files),
        num_tensors=sum(len(file.tensors) for file in plan.files),
        ranks=tuple(ranks),
        read_by_host=tuple(reads.of_host(host) for host in hosts),
        num_files=len(plan.files),
        largest_file_bytes=max(file.num_bytes for file in plan.files),
        ranks_per_host=ranks_per_host,
    )


def _sent(plan: FilePlan, degrees: Degrees) -> list[tuple[int, int]]:
    """Return, for each rank, (bytes, messages) that it sends in an export to the ranks that write the files."""
    sent = [[0, 0] for _ in range(degrees.world_size)]
    for owner, pieces in plan.pieces.items():
        for piece in pieces:
            num_bytes = math.prod(piece.size) * piece.dtype.itemsize
            for source in piece.sources(owner, degrees):
                if source != owner:
                    sent[source][0] += num_bytes
                    sent[source][1] += 1
    return [(num_bytes, messages) for num_bytes, messages in sent]


class _Reads:
    """Counts the slices of weight files that ranks read in a load.

    counts: {(pipeline rank, tensor rank, whether the weights are experts'): [bytes, number of
        slices]}. All expert-parallel ranks read equal amounts.
    """

    def __init__(self, shape: ModelShape, degrees: Degrees, dtype: torch.dtype) -> None:
        self.degrees = degrees
        self.counts: dict[tuple[int, int, bool], list[int]] = {}
        self.shared: dict[tuple[int, bool], int] = {}  # bytes that all tensor ranks of a stage read alike
        for stage in range(shape.num_stages):
            for entry in stage_entries(shape, stage, degrees.expert_size):
                self._add(entry, shape, stage % degrees.pipeline_size, dtype)

    def _add(self, entry: Entry, shape: ModelShape, pipeline_rank: int, dtype: torch.dtype) -> None:
        of_expert = entry.expert is not None
        ranks = self.degrees.expert_tensor_size if of_expert else self.degrees.tensor_size
        held = entry.held_by(0, shape, self.degrees.expert_size)
        itemsize = 4 if entry.frozen else dtype.itemsize
        for tensor_rank in range(ranks):
            count = self.counts.setdefault((pipeline_rank, tensor_rank, of_expert), [0, 0])
            for name, dimension, start, stop in shard_reads(held, shape, tensor_rank, ranks):
                size = list(hf_size(shape, name))
                size[dimension] = stop - start
                count[0] += math.prod(size) * itemsize
                count[1] += 1
        if entry.layout is Layout.REPLICATED:
            shared = math.prod(hf_size(shape, held.hf[0])) * itemsize
            self.shared[pipeline_rank, of_expert] = self.shared.get((pipeline_rank, of_expert), 0) + shared

    def _places(self, rank: int) -> tuple[tuple[int, int, bool, int], ...]:
        """Return two keys that name the slices a rank reads: one for weights outside the experts, one for its experts.

        A key is (pipeline rank, tensor rank, whether the weights are experts', expert-parallel rank).
        Ranks with an equal key read the same slices.
        """
        degrees = self.degrees
        stage = rank // (degrees.world_size // degrees.pipeline_size)
        expert_rank = rank // degrees.expert_tensor_size % degrees.expert_size
        return (
            (stage, rank % degrees.tensor_size, False, 0),
            (stage, rank % degrees.expert_tensor_size, True, expert_rank),
        )

    def of_rank(self, rank: int) -> tuple[int, int]:
        """Return (bytes, number of slices) that a rank reads from weight files."""
        counts = [self.counts.get(place[:3], [0, 0]) for place in self._places(rank)]
        return sum(x for x, _ in counts), sum(x for _, x in counts)

    def of_host(self, ranks: Sequence[int]) -> int:
        """Return the bytes that the ranks of one host read from weight files; bytes read by several count once."""
        places = {place for rank in ranks for place in self._places(rank)}
        total = sum(self.counts.get(place[:3], [0, 0])[0] for place in places)
        alike: dict[tuple[int, bool, int], int] = {}
        for stage, _, of_expert, expert_rank in places:
            alike[stage, of_expert, expert_rank] = alike.get((stage, of_expert, expert_rank), 0) + 1
        return total - sum(self.shared.get(key[:2], 0) * (times - 1) for key, times in alike.items())


def words(figures: dict[str, Any]) -> list[str]:
    """Return two lines of text, one on the load and one on the export.

    figures: the result of ``ModelFiles.figures``.
    """
    speed = f"at {figures['host_bytes_per_s'] / GB:g} GB/s a host (--host-gb-per-s)"
    return [
        f"load: {_gb(figures['model_bytes'])} in {figures['tensors']:,} tensors; a rank reads at most "
        f"{_gb(figures['most_read_bytes'])} in {figures['most_num_reads']:,} slices, a host "
        f"{_gb(figures['most_read_bytes_of_a_host'])}: {figures['load_s']:.3g} s {speed}",
        f"export: {figures['files']:,} files of at most {_gb(figures['largest_file_bytes'])}; a rank writes at most "
        f"{_gb(figures['most_written_bytes'])} and sends {_gb(figures['most_sent_bytes'])} in "
        f"{figures['most_num_messages']:,} messages, a host writes {_gb(figures['most_written_bytes_of_a_host'])}: "
        f"{figures['export_s']:.3g} s (one host alone: {figures['export_by_one_host_s']:.3g} s)",
    ]


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:.4g} GB" if num_bytes >= GB / 10 else f"{num_bytes / 10**6:.3g} MB"

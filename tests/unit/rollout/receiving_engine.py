"""Stand-ins for what takes the sender's weights: a replica in this process, and functions of processes of their own."""

import dataclasses
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from megatron_rl.errors import EngineError
from megatron_rl.rollout.engines.engine import NO_WEIGHTS
from megatron_rl.rollout.engines.replica import WeightReceipt
from megatron_rl.rollout.weight_sync import transport
from megatron_rl.rollout.weight_sync.encoder import BucketEncoder, WholeEncoder
from megatron_rl.rollout.weight_sync.host_copies import HostCopies
from megatron_rl.rollout.weight_sync.sender import WeightSender
from megatron_rl.rollout.weight_sync.transport import Tally, view_of
from megatron_rl.weights.bucket_digest import bucket_checksum
from megatron_rl.weights.delta import difference_of

CPU = torch.device("cpu")


def weights_of(sizes: Sequence[tuple[int, ...]], dtypes=(torch.float32, torch.bfloat16)) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    drawn = [torch.randn(size, generator=random) for size in sizes]
    return {f"weight.{i}": tensor.to(dtypes[i % len(dtypes)]) for i, tensor in enumerate(drawn)}


def num_bytes_of(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def exported(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Lend each tensor until the next is asked for, as ``export_weights`` does."""
    for name, tensor in tensors.items():
        lent = tensor.clone()
        yield name, lent
        lent.fill_(torch.nan)


def broken_after(tensors: dict[str, torch.Tensor], count: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(tensors.items())[:count]
    raise EngineError("the exporter broke")


def sender_of(
    bucket_bytes: int,
    *,
    device: torch.device = CPU,
    encoder: Callable[[], BucketEncoder] = WholeEncoder,
    **given,
) -> WeightSender:
    given = {"channel": "shared_memory", "deadline_s": 30.0} | given
    return WeightSender(bucket_bytes=bucket_bytes, device=device, encoder=encoder(), **given)


class Engine:
    """Stands for a replica with one worker, which holds buckets and patches them where it is told to.

    lies: the fields of its receipt that are not true. held: the tensors of the latest sync.
    changed_buckets: how many buckets of that sync came as what had changed.
    """

    def __init__(self, name: str, **lies: object) -> None:
        self.name, self.lies, self.weight_version = name, lies, NO_WEIGHTS
        self.asked: list[str] = []
        self.start_anew()

    def start_anew(self) -> None:
        self.holds, self.buckets = False, HostCopies()
        self._begin()

    def _begin(self) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.tally, self.end, self.changed_buckets = Tally(), {"version": NO_WEIGHTS}, 0

    def control(self, method: str, arguments: dict, timeout_s: float) -> object:
        self.asked.append(method)
        match method:
            case "init_weight_transfer":
                self.holds = arguments["holds"]
            case "start_weight_update":
                self._begin()
                self.buckets.begin()
            case "update_weights" if arguments["kind"] == "bucket":
                time.sleep(0.01)  # a sender that does not wait for the answer has written over the bucket by now
                self._take(arguments)
            case "update_weights":
                self.end = arguments
                self.buckets.end()
            case "weights_received":
                said = {"version": self.end["version"], "checksum": self.tally.value(), "num_tensors": self.tally.count}
                return [dataclasses.asdict(WeightReceipt(**said)) | self.lies]
        return None

    def _take(self, bucket: dict) -> None:
        sent = torch.frombuffer(bytearray(pathlib.Path(bucket["segment"]).read_bytes()), dtype=torch.uint8)
        if changes := bucket.get("difference"):
            self.changed_buckets += 1
            tensors, packed = self.buckets.patch(changes, sent[: difference_of(changes).num_bytes])
        else:
            assert len(sent) >= bucket["num_bytes"]
            tensors, packed = bucket["tensors"], sent[: bucket["num_bytes"]]
            packed = self.buckets.keep(tensors, packed) if self.holds else packed
        if bucket_checksum(tensors, packed) != bucket["checksum"]:
            raise EngineError("a bucket did not arrive as it was sent")
        for name, dtype, shape, start in tensors:
            assert name not in self.held, f"{name} came twice"
            self.held[name] = view_of(packed, dtype, shape, start).clone()
        self.tally.add(bucket["checksum"], len(tensors))


def run_worker(answers: int, deadline_s: float) -> None:
    """Take calls as an engine's worker, a process that the nursery forks; ``answers``: a descriptor."""
    from tools.acceptance_matrix import channel_worker

    os.dup2(answers, 1)  # without the warnings, which standard error gets
    channel_worker.main(deadline_s)


def own_segment(told: int, folder: str) -> None:
    """Own a segment in the folder until the process is killed; ``told``: a descriptor that gets its path."""
    transport.segment_folders = lambda: (pathlib.Path(folder),)
    segment = transport.Segment(4096)
    os.write(told, f"{segment.path}\n".encode())
    signal.pause()

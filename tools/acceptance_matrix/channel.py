"""Measures a channel of weight sync: the trainer's sender, and another process that takes every bucket and compares.

The other process stands for an engine's worker; it reads and writes JSON lines, by acceptance_matrix/channel_worker.py.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import torch
from acceptance_matrix.cells import Cell
from acceptance_matrix.facts import HOST

from megatron_rl.errors import EngineError
from megatron_rl.rollout.engines.engine import NO_WEIGHTS
from megatron_rl.rollout.weight_sync.changed_encoder import ChangedEncoder
from megatron_rl.rollout.weight_sync.encoder import WholeEncoder
from megatron_rl.rollout.weight_sync.sender import WeightSender

BUCKET_BYTES = 2**20
NUM_SYNCS = 2  # the second over channels and memory that the first has opened
FULL_EVERY = 3  # with weight_sync.delta
NUM_DELTA_SYNCS = 5  # all, changes, changes, all, changes
MOVED_SHARE = 0.01


class Worker:
    """Drives the other process as far as the sender knows a replica."""

    def __init__(self, deadline_s: float) -> None:
        self.name, self.weight_version, self.flips = "the other process", NO_WEIGHTS, ""
        root = pathlib.Path(__file__).resolve().parents[2]
        environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        if "NCCL_HOSTID" in environment:
            environment["NCCL_HOSTID"] = "engine"
        self.process = subprocess.Popen(
            [sys.executable, str(pathlib.Path(__file__).with_name("channel_worker.py")), str(deadline_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def control(self, method: str, arguments: dict, timeout_s: float) -> object:
        """Send one call and return its answer. Raises EngineError where the process is gone or refused it."""
        if self.flips and arguments.get("kind") == "bucket" and (self.flips != "changes" or "difference" in arguments):
            arguments = {**arguments, "flip": True}
        self.process.stdin.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline() or '{"error": "the other process ended"}')
        if "error" in answer:
            raise EngineError(f"{method}: {answer['error']}")
        return answer["value"]

    def close(self) -> None:
        self.process.stdin.close()  # its loop ends, or its own deadline ends it
        self.process.wait()


def make_weights(device: torch.device) -> dict[str, torch.Tensor]:
    """Make 12 MB of tensors of two dtypes and odd sizes, one larger than a bucket."""
    random = torch.Generator().manual_seed(0)
    sizes = [(3,), (513, 257), (1,), (1024, 700), (64, 9), (2, 2), (1025, 511), (13,)]
    dtypes = (torch.float32, torch.bfloat16)
    return {
        f"weight.{i}": torch.randn(size, generator=random).to(dtypes[i % 2]).to(device) for i, size in enumerate(sizes)
    }


def lent(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Lend each tensor until the next is asked for, as an export does."""
    for name, tensor in tensors.items():
        copy = tensor.clone()
        yield name, copy
        copy.zero_()


def move(tensors: dict[str, torch.Tensor], random: torch.Generator) -> None:
    """Change about a hundredth of the elements, as a small step changes bfloat16 weights."""
    for tensor in tensors.values():
        moved = (torch.rand(tensor.shape, generator=random) < MOVED_SHARE).to(tensor.device)
        tensor[moved] += 1


def num_undelivered(
    channel: str, device: torch.device, deadline_s: float, *, flips: str = "", delta: bool = False
) -> float:
    """Return how many tensors did not arrive to the bit, over two syncs, or five of which three bring what changed.

    flips: "bytes" to flip one of every bucket, "changes" one of every bucket that brings what changed.
    """
    tensors, worker = make_weights(device), Worker(deadline_s)
    worker.flips = flips
    encoder = ChangedEncoder(FULL_EVERY) if delta else WholeEncoder()
    sender = WeightSender(
        channel=channel, bucket_bytes=BUCKET_BYTES, deadline_s=deadline_s, device=device, encoder=encoder
    )
    random = torch.Generator().manual_seed(1)
    try:
        lost = 0.0
        for version in range(1, 1 + (NUM_DELTA_SYNCS if delta else NUM_SYNCS)):
            report = sender.deliver(lent(tensors), version, [worker])
            if report.failed:
                print(f"sync {version} by {channel}: {report.failed}", file=sys.stderr)
                return float(len(tensors))
            lost += len(tensors) - report.num_tensors
            whole = not delta or version % FULL_EVERY == 1
            if (report.sent_bytes < report.num_bytes / 10) == whole:
                print(f"sync {version} by {channel} sent {report.sent_bytes:,} bytes", file=sys.stderr)
                return float(len(tensors))
            move(tensors, random)
        return lost
    finally:
        sender.free()
        worker.close()


def measure(cell: Cell, fault: str, deadline_s: float, folder: pathlib.Path) -> dict:
    channel, delta = cell.overrides[0].partition("=")[2], "weight_sync.delta=true" in cell.overrides
    flips = ("changes" if delta else "bytes") if fault == "flip-byte" else ""
    lost = num_undelivered(channel, HOST.device, deadline_s, flips=flips, delta=delta)
    return {"errors": {"delivered": lost}, "backend": HOST.backend, "channel": channel}

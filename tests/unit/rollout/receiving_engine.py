"""A stand-in for a replica that takes the sender's weights, over shared memory and late."""

from __future__ import annotations

import dataclasses
import pathlib
import time

import torch

from megatron_rl.rollout.engine import NO_WEIGHTS
from megatron_rl.rollout.vllm.replica import WeightReceipt
from megatron_rl.rollout.weight_sync.transport import Tally, view_of
from megatron_rl.weights.bucket_digest import bucket_checksum


class Engine:
    """Stands for a replica as far as WeightSender knows it.

    lies: the fields of its receipt that are not true.
    """

    def __init__(self, name: str, **lies: object) -> None:
        self.name, self.lies, self.weight_version = name, lies, NO_WEIGHTS
        self.asked: list[str] = []
        self.held: dict[str, torch.Tensor] = {}
        self.tally, self.end = Tally(), None

    def control(self, method: str, arguments: dict, timeout_s: float) -> object:
        self.asked.append(method)
        if method == "start_weight_update":
            self.held, self.tally, self.end = {}, Tally(), None
        if method == "update_weights" and arguments["kind"] == "bucket":
            time.sleep(0.02)  # a sender that does not wait for the answer has written over the bucket by now
            self.take(arguments)
        elif method == "update_weights":
            self.end = arguments
        if method == "weights_received":
            said = WeightReceipt(version=self.end["version"], checksum=self.tally.value(), num_tensors=self.tally.count)
            return [{**dataclasses.asdict(said), **self.lies}]
        return None

    def take(self, bucket: dict) -> None:
        packed = torch.frombuffer(bytearray(pathlib.Path(bucket["segment"]).read_bytes()), dtype=torch.uint8)
        assert len(packed) >= bucket["num_bytes"]
        for name, dtype, shape, start in bucket["tensors"]:
            assert name not in self.held, f"{name} came twice"
            self.held[name] = view_of(packed, dtype, shape, start)
        assert bucket_checksum(bucket["tensors"], packed[: bucket["num_bytes"]]) == bucket["checksum"]
        self.tally.add(bucket["checksum"], len(bucket["tensors"]))

"""Takes buckets of weights in a process of its own, as an engine's worker does, and compares their checksums.

acceptance_matrix/channel.py starts it: one JSON line per call on standard input, one answer on standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta

import torch

from megatron_rl.rollout.weight_sync.host_copies import HostCopies
from megatron_rl.rollout.weight_sync.mapped import MappedSegments
from megatron_rl.rollout.weight_sync.transport import Tally, join_group, open_storage, receive
from megatron_rl.weights.bucket_digest import bucket_checksum
from megatron_rl.weights.delta import difference_of


class Worker:
    """Keeps what one sync has brought so far."""

    def __init__(self) -> None:
        self.group, self.tally, self.end = None, Tally(), {}
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.maps = MappedSegments(self.device)
        self.copies, self.holds = HostCopies(), False

    def init_weight_transfer(self, info: dict) -> None:
        self.holds = info["holds"]
        if not self.holds:
            self.copies.clear()
        if info["channel"] == "broadcast":
            if self.device.type == "cuda":  # another GPU than the trainer's, where there is one
                self.device = torch.device("cuda", torch.cuda.device_count() - 1)
                torch.cuda.set_device(self.device)
            deadline = timedelta(seconds=info["deadline_s"])
            rank, world = info["first_rank"], info["world_size"]
            self.group = None  # an earlier one ends with its last reference
            self.group = join_group(info["address"], info["port"], rank, world, info["group_backend"], deadline)

    def start_weight_update(self, _: dict) -> None:
        self.tally, self.end = Tally(), {}
        self.copies.begin()

    def update_weights(self, message: dict) -> None:
        if message["kind"] == "end":
            self.end = message
            return
        changes = message.get("difference")
        num_bytes = difference_of(changes).num_bytes if changes else message["num_bytes"]
        packed = self.packed(message, num_bytes)[:num_bytes].to(self.device, non_blocking=True, copy=True)
        if message.get("flip") and len(packed):
            packed[-1] ^= 1
        tensors = message.get("tensors")
        if changes:
            tensors, packed = self.copies.patch(changes, packed)
        elif self.holds:
            packed = self.copies.keep(tensors, packed)
        seen = bucket_checksum(tensors, packed.to(self.device))
        if seen != message["checksum"]:
            raise ValueError(f"a bucket arrived with checksum {seen}, the trainer sent {message['checksum']}")
        self.tally.add(message["checksum"], len(tensors))

    def packed(self, message: dict, num_bytes: int) -> torch.Tensor:
        """Return the bytes that a bucket brings, uint8, from the channel that it names."""
        if "segment" in message:
            return self.maps.bytes_of(message["segment"])
        if "storage" in message:
            return open_storage(message["storage"], 0)
        return receive(self.group, num_bytes, self.device)

    def weights_received(self, _: dict) -> list[dict]:
        version = self.end.get("version", -1)
        return [{"version": version, "checksum": self.tally.value(), "num_tensors": self.tally.count}]

    def answer(self, call: dict) -> object:
        known = (self.init_weight_transfer, self.start_weight_update, self.update_weights, self.weights_received)
        methods: dict[str, Callable] = {method.__name__: method for method in known}
        value = methods[call["method"]](call["arguments"]) if call["method"] in methods else None
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return value


def main(deadline_s: float) -> None:
    end = threading.Timer(deadline_s, os._exit, (1,))  # a trainer that is gone leaves nothing behind
    end.daemon = True
    end.start()
    worker = Worker()
    for line in sys.stdin:
        try:
            answer = {"value": worker.answer(json.loads(line))}
        except (ValueError, RuntimeError, OSError, KeyError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/acceptance_matrix/channel_worker.py 60 < calls.jsonl",
    )
    parser.add_argument("deadline_s", type=float, help="seconds after which this process ends itself")
    main(parser.parse_args().deadline_s)

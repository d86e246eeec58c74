"""Measures every channel of weight sync into another process: GB/s, and whether all bytes arrive.

    python tools/gpu_report_steps/channels.py --json channels.json

The other process stands for one engine's worker (acceptance_matrix/channel_worker.py): it copies every bucket to its
device and compares the checksum, as the receiver in vLLM does, and loads nothing. Both are on one GPU; broadcast meets
over NCCL's sockets there, whose speed says nothing about links between GPUs.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys

import torch
from clock import DEVICE, write

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))


def make_tensors(total_bytes: int) -> dict[str, torch.Tensor]:
    """Make bfloat16 tensors of 64 MB (the last may be smaller) that hold so many bytes together."""
    random, found, left = torch.Generator(device=DEVICE).manual_seed(0), {}, total_bytes // 2
    while left:
        size = min(left, 2**25)
        found[f"weight.{len(found)}"] = torch.randn(
            size, generator=random, device=DEVICE, dtype=torch.float32
        ).bfloat16()
        left -= size
    return found


def measure(channel: str, tensors: dict[str, torch.Tensor], bucket_bytes: int) -> dict:
    from acceptance_matrix.channel import Worker

    from megatron_rl.rollout.weight_sync.sender import WeightSender

    if channel == "cuda_ipc" and DEVICE.type != "cuda":
        return {"channel": channel, "absent": "needs a GPU"}
    worker = Worker(60.0)
    sender = WeightSender(channel=channel, bucket_bytes=bucket_bytes, deadline_s=30.0, device=DEVICE)
    seconds, num_bytes = [], sum(x.numel() * x.element_size() for x in tensors.values())
    try:
        for version in range(1, 4):
            report = sender.deliver(iter(tensors.items()), version, [worker])
            if report.failed or report.num_tensors != len(tensors):
                return {"channel": channel, "failed": f"{report.failed or report.num_tensors}"}
            seconds.append(report.seconds)
    except (RuntimeError, OSError) as error:
        return {"channel": channel, "failed": f"{type(error).__name__}: {error}"[:300]}
    finally:
        sender.free()
        worker.close()
    return {"channel": channel, "seconds": seconds, "gb_per_s": num_bytes / statistics.median(seconds[1:]) / 1e9}


def says(row: dict) -> str:
    if "gb_per_s" not in row:
        return f"{row['channel']}: {row.get('absent') or row['failed']}"
    return f"{row['channel']}: {row['gb_per_s']:.2f} GB/s ({row['seconds'][-1]:.2f} s; first {row['seconds'][0]:.2f} s)"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/gpu_report_steps/channels.py --json channels.json",
    )
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--small", action="store_true", help="8 MB in place of 4 GB")
    given = parser.parse_args(arguments)
    if DEVICE.type == "cuda":
        from acceptance_matrix.shared_gpu import share

        os.environ.setdefault("RANK", "0")
        share()
    total, bucket = (8_000_000, 2**21) if given.small else (4 * 10**9, 512 * 2**20)
    tensors, rows = make_tensors(total), []
    for channel in ("cuda_ipc", "shared_memory", "broadcast"):
        rows.append(measure(channel, tensors, bucket))
        failed = "; ".join(f"{x['channel']}: {x['failed']}" for x in rows if "failed" in x)
        found = {"headline": [says(x) for x in rows], "bytes": total, "channels": rows, "failed": failed}
        code = write(given.json, found)
    return code


if __name__ == "__main__":
    raise SystemExit(main())

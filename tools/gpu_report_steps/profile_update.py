"""Profiles one update by torch's profiler: kernels, idle share, and the calls that wait for the device.

    python tools/gpu_report_steps/profile_update.py --json profile.json

Qwen2.5-0.5B's shapes, random weights, bfloat16, one process, a few micro-batches of up to 4,096 tokens. A wait is a
call in which the host asks the device for a number or for its end; more than one a micro-batch leaves the device idle.
The device's busy seconds are set against the update's own, without the profiler, beside which the host is slower.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import torch
from clock import DEVICE, seconds_of, write
from torch.profiler import ProfilerActivity, profile

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "benchmarks"))
# By the driver's calls on a GPU; on a CPU by the questions that would make them.
WAITS = {
    "cuda": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    "cpu": ("aten::_local_scalar_dense",),
}
SHAPE = "--dtype bfloat16 --groups 4 --mean-tokens 1024 --max-tokens-per-microbatch 4096"
SMALL = "--hidden 64 --layers 2 --vocab 512 --groups 8 --mean-tokens 32 --max-tokens-per-microbatch 128"


def device_seconds(event: object) -> float:
    return getattr(event, "self_device_time_total", 0.0) / 1e6  # torch 2.6 and newer; microseconds


def busy_seconds(found: profile) -> float:
    """Return the seconds in which at least one kernel ran: the union of the kernels' spans."""
    spans = sorted(
        (x.time_range.start, x.time_range.end)
        for x in found.events()
        if x.device_type == torch.autograd.DeviceType.CUDA and x.time_range.end > x.time_range.start
    )
    busy, until = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / 1e6


def measure(small: bool, settings: list[str]) -> dict:
    import skip

    words = SMALL.split() if small else ["--hf-path", str(FOLDER / "qwen2.5-0.5b"), *SHAPE.split()]
    given = skip.parse([*words, "--set", *settings])
    backend = skip.build_backend(given)
    case = skip.make_case(backend, skip.make_batch(backend, given), 0.0, given)
    for _ in range(2):
        skip.update_once(backend, case, "dense", keep=False)
    plain_s = seconds_of(lambda: skip.update_once(backend, case, "dense", keep=True))
    update_s, step_s = case.updates["dense"][-1]
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if DEVICE.type == "cuda" else [])]
    plan = case.plans["train", "dense"]
    with profile(activities=activities) as found:
        profiled_s, _ = skip.update(
            backend, case.batches["train", "dense"], plan.mini_batches[0], plan.fingerprints()[0], case.inputs
        )
    microbatches = sum(int(x.rank_offsets[-1]) for x in plan.mini_batches)
    averages = found.key_averages()
    waits = {x.key: x.count for x in averages if x.key in WAITS[DEVICE.type]}
    on_device = [x for x in averages if x.device_type == torch.autograd.DeviceType.CUDA]  # an operator's hold them too
    kernels = sorted(on_device, key=device_seconds, reverse=True)[:15]
    busy, launches = busy_seconds(found), sum(x.count for x in on_device)
    backend.close()
    says = [
        f"{update_s:.3f} s an update, {step_s:.3f} s of it the optimizer step; {plain_s - update_s:.3f} s the log-prob "
        f"pass; {microbatches} micro-batches, {sum(waits.values()) / max(1, microbatches):.1f} waits a micro-batch",
        f"device busy {busy:.3f} s, {100 * busy / update_s:.0f} % of the update; {launches / max(1, microbatches):.0f} "
        f"kernels a micro-batch; {profiled_s:.3f} s under the profiler",
    ]
    return {
        "headline": says,
        "update_s": update_s,
        "optimizer_s": step_s,
        "microbatches": microbatches,
        "waits": waits,
        "busy_s": busy,
        "profiled_s": profiled_s,
        "launches": launches,
        "kernels": [{"name": x.key[:120], "count": x.count, "seconds": device_seconds(x)} for x in kernels],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/gpu_report_steps/profile_update.py --json profile.json",
    )
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the configuration")
    given = parser.parse_args(arguments)
    return write(given.json, measure(given.small, given.set))


if __name__ == "__main__":
    raise SystemExit(main())

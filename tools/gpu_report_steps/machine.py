"""Prints the machine of a measurement as one JSON line: GPU, driver, cuDNN, NCCL, packages.

python tools/gpu_report_steps/machine.py
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess

PACKAGES = ("torch", "triton", "transformers", "megatron-core", "transformer-engine", "vllm", "fla-core", "numpy")


def driver_version() -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        if done.returncode == 0:
            return done.stdout.splitlines()[0].strip()
    with contextlib.suppress(OSError):
        return pathlib.Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return "none"


def describe() -> dict:
    import torch

    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cudnn = torch.backends.cudnn.version() if gpus else None
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else None
    name = torch.cuda.get_device_name() if gpus else f"{platform.machine()} CPU, {os.cpu_count()} cores"
    return {
        "gpus": gpus,
        "device": f"{gpus} x {name}" if gpus else name,
        "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1) if gpus else None,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "cudnn": cudnn,
        "nccl": nccl,
        "python": platform.python_version(),
        "versions": versions,
    }


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog="example: python tools/gpu_report_steps/machine.py"
    ).parse_args()
    print(json.dumps(describe()))

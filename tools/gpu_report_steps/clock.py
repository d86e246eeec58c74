"""Times calls on this process's device, and writes what a step found."""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # megatron_rl and tests/ of this tree

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], object]) -> float:
    """Return the wall seconds of one call, its work on the device included."""
    synchronize()
    started = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - started


def write(path: pathlib.Path, found: Mapping[str, object]) -> int:
    """Write a step's figures as JSON, print them, and return its exit code: 1 if `failed` names a reason."""
    text = json.dumps(found, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    print(text)
    return 1 if found.get("failed") else 0

"""The Megatron-Core releases that the seam was read and run on. This module imports the standard library alone."""

from __future__ import annotations

import importlib.metadata
import re

MEGATRON_LEAST, MEGATRON_BELOW = "0.16.1", "0.20"


def release(version: str) -> tuple[int, ...]:
    """Return a version's numbers ("2.13.0+cpu" → (2, 13, 0)) without `packaging`, which may be missing here."""
    matched = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in matched.group().split(".")) if matched else ()


def older(version: str, bound: str) -> bool:
    a, b = release(version), release(bound)
    width = max(len(a), len(b))
    return a + (0,) * (width - len(a)) < b + (0,) * (width - len(b))


def check_megatron_core() -> None:
    """Raise ImportError where the installed megatron-core is outside the supported range.

    A missing one passes: its own import raises.
    """
    try:
        installed = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return
    if older(installed, MEGATRON_LEAST) or not older(installed, MEGATRON_BELOW):
        raise ImportError(
            f"megatron-core {installed} is installed, and megatron_rl supports {MEGATRON_LEAST} up to, not including, "
            f"{MEGATRON_BELOW}: outside it the schedule may divide or reduce what the loss does not expect; pip "
            f"install 'megatron-core>={MEGATRON_LEAST},<{MEGATRON_BELOW}'"
        )

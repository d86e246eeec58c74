"""Packs a folder from which a bare machine with a GPU runs tools/gpu_report.py: the project, and wheels.

    python tools/pack_gpu_report.py --out wheels

That machine needs Python 3.12 on x86-64 Linux, torch with CUDA, triton, transformers and numpy, and no network. The
folder gets wheels of what megatron_rl imports beyond these, by pip's own download (a package without a wheel is built
here), requirements.txt with their versions, and project.tar.gz, this repository's HEAD. There:

    tar xzf wheels/project.tar.gz && python tools/gpu_report.py --wheels wheels --stage 1
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIMIT_MIB = 60.0
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
# setup.py's requirements and what they import in turn, but for torch, triton, transformers, tokenizers, safetensors,
# numpy and sympy, which come with torch and transformers. TensorBoard is imported only where a run asks for it.
PACKAGES = (
    "megatron-core==0.19.2",
    "math-verify>=0.8",
    "latex2sympy2_extended",
    "antlr4-python3-runtime<=4.13.2,>=4.9.3",
    "omegaconf",
    "PyYAML>=6.0",
    "rich>=13",
    "markdown-it-py",
    "mdurl",
    "pygments",
    "psutil>=5.9",
    "packaging>=24.2",
)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/pack_gpu_report.py --out wheels --also transformers==5.19.0",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, required=True, metavar="FOLDER", help="a new folder, or one of an earlier call"
    )
    parser.add_argument("--also", nargs="*", default=[], metavar="PACKAGE", help="further packages, without their own")
    parser.add_argument("--without-project", action="store_true", help="leave project.tar.gz out: the tree travels")
    given = parser.parse_args(arguments)
    if given.out.exists() and not given.out.is_dir():
        parser.error(f"--out {given.out} is a file; name a folder")
    strange = [path.name for path in given.out.glob("*") if not ours(path)]
    if strange:
        parser.error(f"--out {given.out} holds {strange[0]}, which this tool did not put there; name another folder")
    return given


def ours(path: pathlib.Path) -> bool:
    return path.suffix == ".whl" or path.name in ("requirements.txt", "project.tar.gz")


def fetch(package: str, out: pathlib.Path) -> None:
    """Bring one package's wheel for the other machine; build it here where the index has its source alone."""
    pip = [sys.executable, "-m", "pip"]
    target = ["--python-version", PYTHON, "--implementation", "cp"]
    target += [word for platform in PLATFORMS for word in ("--platform", platform)]
    download = [
        *pip,
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        *target,
        "--dest",
        str(out),
        package,
    ]
    done = subprocess.run(download, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    built = subprocess.run(
        [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), package],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        raise SystemExit(f"pack_gpu_report.py: {package}: no wheel ({done.stderr.strip()[-300:]}), and none was built")


def foreign(wheel: pathlib.Path) -> bool:
    """Return whether a wheel's tags exclude Python 3.12 on x86-64 Linux, as those of one that was built here may."""
    python, _, platform = wheel.stem.split("-")[-3:]
    right_python = python.split(".")[-1] in ("py3", "cp312") or "abi3" in wheel.stem
    return not (right_python and (platform == "any" or "manylinux" in platform))


def requirements(out: pathlib.Path) -> list[str]:
    """Return one line name==version per wheel. Raises SystemExit where a wheel cannot be installed there, or twice."""
    lines: dict[str, str] = {}
    for wheel in sorted(out.glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        key = re.sub(r"[-_.]+", "-", name).lower()
        if foreign(wheel):
            raise SystemExit(f"pack_gpu_report.py: {wheel.name} is not for Python {PYTHON} on x86-64 Linux")
        if key in lines:
            raise SystemExit(f"pack_gpu_report.py: {out} holds {key} twice; empty it and pack again")
        lines[key] = f"{key}=={version}"
    return list(lines.values())


def pack_project(out: pathlib.Path) -> None:
    """Write HEAD's files as project.tar.gz; what is not committed stays behind."""
    path = out / "project.tar.gz"
    done = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "--format=tar.gz", "--output", str(path.resolve()), "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"pack_gpu_report.py: git archive: {done.stderr.strip()}; or pass --without-project")


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    for path in given.out.iterdir():
        path.unlink()
    for package in (*PACKAGES, *given.also):
        fetch(package, given.out)
    (given.out / "requirements.txt").write_text("\n".join(requirements(given.out)) + "\n")
    if not given.without_project:
        pack_project(given.out)
    sizes = {path.name: path.stat().st_size for path in sorted(given.out.iterdir())}
    for name, size in sizes.items():
        print(f"{size / 2**20:8.2f} MiB  {name}")
    total = sum(sizes.values()) / 2**20
    print(f"{total:8.2f} MiB  in all, of {LIMIT_MIB:g}")
    return 1 if total > LIMIT_MIB else 0


if __name__ == "__main__":
    sys.exit(main())

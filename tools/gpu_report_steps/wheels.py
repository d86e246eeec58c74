"""Fetches wheels for a machine without a network, and makes a large one small."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence

from gpu_report_steps.prune_fatbin import prune

PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
PIP = (sys.executable, "-m", "pip")


class CarryError(Exception):
    """Says why what should travel cannot be made, and the way out."""


def fetch(package: str, out: pathlib.Path, *, build: bool = True) -> None:
    """Bring one package's wheel for the other machine; build it here where the index has its source alone."""
    target = ["--python-version", PYTHON, "--implementation", "cp"]
    target += [word for platform in PLATFORMS for word in ("--platform", platform)]
    download = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", *target, "--dest", str(out), package]
    done = subprocess.run([*PIP, *download], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    why = done.stderr.strip()[-300:]
    if not build:
        raise CarryError(f"{package}: pip brings no wheel of it: {why}")
    make = ["wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), package]
    if subprocess.run([*PIP, *make], capture_output=True, text=True, check=False).returncode:
        raise CarryError(f"{package}: pip brings no wheel of it ({why}), and none could be built here")


def foreign(wheel: pathlib.Path) -> bool:
    """Return whether a wheel's tags exclude Python 3.12 on x86-64 Linux, as those of one that was built here may."""
    python, _, platform = wheel.stem.split("-")[-3:]
    right_python = bool({"py3", "cp312"} & set(python.split("."))) or "abi3" in wheel.stem
    return not (right_python and (platform == "any" or "linux" in platform and "x86_64" in platform))


def check_folder(folder: pathlib.Path) -> None:
    """Refuse wheels that cannot be installed there, or twice. Raises CarryError."""
    seen: dict[str, str] = {}
    for wheel in sorted(folder.glob("*.whl")):
        key = re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()
        if foreign(wheel):
            raise CarryError(f"{wheel.name} is not for Python {PYTHON} on x86-64 Linux")
        if key in seen:
            raise CarryError(f"{folder} holds {key} twice, {seen[key]} and {wheel.name}; leave one")
        seen[key] = wheel.name


def repack(
    wheel: pathlib.Path,
    target: pathlib.Path,
    *,
    left_out: Sequence[str],
    arch: int,
    unused: Sequence[bytes] = (),
) -> None:
    """Write the wheel again without some of its files, and its libraries without what another GPU would load.

    left_out: regular expressions; a file whose name one of them matches from the start does not travel.
    unused: as in prune.
    """
    rows = []
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed,
    ):
        record = next(name for name in source.namelist() if name.endswith(".dist-info/RECORD"))
        for info in source.infolist():
            name = info.filename
            if info.is_dir() or name == record or any(re.match(x, name) for x in left_out):
                continue
            data = source.read(info)
            if re.search(r"\.so(\.\d+)*$", name):
                data = small(data, arch, unused)
            entry = zipfile.ZipInfo(name)
            entry.external_attr, entry.compress_type = info.external_attr, zipfile.ZIP_DEFLATED
            packed.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append((name, f"sha256={digest}", len(data)))
        table = io.StringIO()
        csv.writer(table, lineterminator="\n").writerows([*rows, (record, "", "")])
        packed.writestr(record, table.getvalue())


def small(library: bytes, arch: int, unused: Sequence[bytes]) -> bytes:
    """Return a library without symbols that no loader reads, and with one GPU's machine code alone."""
    if not shutil.which("strip"):
        raise CarryError("there is no strip on the PATH; install binutils")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "library.so")
        path.write_bytes(library)
        done = subprocess.run(["strip", "--strip-unneeded", str(path)], capture_output=True, text=True, check=False)
        data = bytearray(path.read_bytes() if done.returncode == 0 else library)  # some are no files that strip knows
    prune(data, arch, unused)
    return bytes(data)

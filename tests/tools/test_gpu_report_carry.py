"""Checks tools/gpu_report.py --carry as far as it asks no package index: folders, wheels made small, refusals."""

from __future__ import annotations

import hashlib
import pathlib
import re
import struct
import sys
import tarfile
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import gpu_report  # noqa: E402
from gpu_report_steps import carry, sites  # noqa: E402
from gpu_report_steps.prune_fatbin import CODE, PTX, containers, prune  # noqa: E402
from gpu_report_steps.wheels import CarryError, check_folder, repack  # noqa: E402

MEGATRON = "megatron_core-0.19.2-cp312-cp312-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl"


def container(*rows: tuple[int, int, bytes]) -> bytes:
    """Return a container as nvcc writes it, of (kind, architecture, payload)."""
    body = b""
    for kind, arch, payload in rows:
        head = struct.pack("<HHIQ", kind, 0x101, 64, len(payload)).ljust(28, b"\0") + struct.pack("<I", arch)
        body += head.ljust(64, b"\0") + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


LIBRARY = (
    b"\x7fELF and other bytes \x50\xed\x55\xba by chance"
    + container((CODE, 80, b"a" * 40), (CODE, 90, b"b" * 24), (PTX, 100, b"c" * 16))
    + b"between"
    + container((PTX, 80, b"d" * 32), (CODE, 100, b"e" * 8))
    + b"after"
)


def test_code_of_other_gpus_becomes_zeros_and_nothing_moves() -> None:
    data = bytearray(LIBRARY)
    assert prune(data, 90) == 40 + 16 + 8
    assert len(data) == len(LIBRARY) and list(containers(data)) == list(containers(LIBRARY))
    assert data == LIBRARY.replace(b"a" * 40, bytes(40)).replace(b"c" * 16, bytes(16)).replace(b"e" * 8, bytes(8))
    with pytest.raises(ValueError, match="has kind 7"):
        prune(bytearray(container((7, 90, b"x"))), 90)


def test_a_wheel_that_was_made_small_is_a_wheel(tmp_path: pathlib.Path) -> None:
    wheel, target = tmp_path / "a-1-py3-none-any.whl", tmp_path / "small.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for name, data in (("a/x.so", LIBRARY), ("a/jax/y.py", b"y"), ("a/z.py", b"z"), ("a-1.dist-info/RECORD", b"")):
            file.writestr(name, data)
    repack(wheel, target, left_out=("a/jax/",), arch=90)
    with zipfile.ZipFile(target) as file:
        assert file.namelist() == ["a/x.so", "a/z.py", "a-1.dist-info/RECORD"]
        assert len(file.read("a/x.so")) == len(LIBRARY) and b"aaaa" not in file.read("a/x.so")
        rows = file.read("a-1.dist-info/RECORD").decode().splitlines()
    assert [row.rsplit(",", 1)[1] for row in rows] == [str(len(LIBRARY)), "1", ""]
    assert hashlib.sha256(b"z").digest()[:3].hex() == "594e51" and rows[1].startswith("a/z.py,sha256=WU5R")


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ([MEGATRON, "PyYAML-6.0-cp311-cp311-manylinux2014_x86_64.whl"], "is not for Python 3.12 on x86-64 Linux"),
        (["PyYAML-6.0-cp312-cp312-macosx_11_0_arm64.whl"], "is not for Python 3.12 on x86-64 Linux"),
        (["rich-15.0.0-py3-none-any.whl", "rich-14.0.0-py3-none-any.whl"], "holds rich twice"),
    ],
)
def test_wheels_that_would_not_install_are_refused(tmp_path: pathlib.Path, names: list[str], says: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(CarryError, match=re.escape(says)):
        check_folder(tmp_path)


def test_a_folder_with_other_files_is_left_alone(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SystemExit):
        gpu_report.main(["--carry", str(tmp_path)])
    assert "thesis.tex, which this tool did not put there" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()


def test_every_requirement_of_setup_is_packed_or_comes_with_torch() -> None:
    text = (ROOT / "setup.py").read_text().split("install_requires=[")[1].split("]")[0]
    wanted = {re.match(r"[\w-]+", line)[0] for line in re.findall(r'"([^"]+)"', text)}
    packed = {re.match(r"[\w-]+", line)[0].lower() for line in carry.BASE}
    there = {"torch", "triton", "transformers", "tokenizers", "safetensors", "numpy"}
    assert wanted - packed - there == {"tensorboard"}  # imported only where a run asks for it


def test_the_project_is_head_and_names_its_commit(tmp_path: pathlib.Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this tree is no git repository")
    carry.pack_project(tmp_path)
    with tarfile.open(tmp_path / "project.tar.gz") as file:
        assert {"setup.py", "megatron_rl/train.py", "tools/acceptance.py"} <= set(file.getnames())
        assert re.fullmatch(r"[0-9a-f]{12}\n", file.extractfile("COMMIT").read().decode())


def test_halves_travel_in_turn_and_are_joined(tmp_path: pathlib.Path) -> None:
    out, wheels = tmp_path / "out", tmp_path / "wheels"
    for name, half in zip(sites.HALVES, (b"first ", b"second"), strict=True):
        (wheels / name).mkdir(parents=True)
        (wheels / name / sites.SMOLLM2).write_bytes(half)
        assert sites.why_absent(out, "smollm2")
        assert sites.install(wheels, out) == [name]
        (wheels / name / sites.SMOLLM2).unlink()
    assert not sites.why_absent(out, "smollm2") and sites.smollm2_wheel(out).read_bytes() == b"first second"


def test_a_trip_that_is_too_large_is_named(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    for name, size in (("base", 2**20), ("te", 60 * 2**20)):
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "x-1-py3-none-any.whl", "wb") as file:
            file.truncate(size)
    assert carry.show(tmp_path, [1]) == 1
    printed = capsys.readouterr()
    assert "61.00 MiB  part 1: base + te, of 60" in printed.out and "by 1.00 MiB, most of it te/" in printed.err

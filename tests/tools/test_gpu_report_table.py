"""Checks the table that tools/gpu_report.py --table writes of its records: figures, floors, and what was not run."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import gpu_report  # noqa: E402
from gpu_report_steps import table  # noqa: E402

H100 = {
    **{"gpus": 1, "device": "1 x NVIDIA H100", "driver": "580", "cuda": "13.0", "cudnn": 91900, "nccl": "2.28.9"},
    **{"python": "3.12.3", "versions": {"torch": "2.11.0"}},
}
SETTINGS = {
    **{"hf_path": "/somewhere/qwen2.5-1.5b", "groups": 8, "group_size": 4, "mean_tokens": 2048},
    **{"max_tokens_per_microbatch": 8192, "dtype": "bfloat16", "hidden": 3584, "vocab": 151936},
}
DENSE = {"dead_share": 0.75, "dense_s": 2.0, "skip_s": 0.5, "ratio": 4.0, "share_of_planned": 0.87}


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
    page = table.table(
        [
            record("cells, one process", {"cells": cells}, "failed", "1 passed, 1 failed"),
            record("skip", {"settings": SETTINGS, "rows": [{**DENSE, "dense_mfu": 0.3, "skip_mfu": 0.25}]}),
            record("log-probs, own chunk", {"settings": SETTINGS, "rows": [logprob]}),
            record("offload", {"headline": ["moved"], "bytes": 3.35e12}),
            record("collectives", {"headline": ["14 of 14 right"]}),
        ]
    )
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

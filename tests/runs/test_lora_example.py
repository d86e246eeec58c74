"""``bash examples/lora/run.sh``, as a user runs it, for 60 of its 200 rollouts.

The reward rises, and both models lie in their places. docs/lora.md has the whole run.
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
BOUND_S = patient(600)


@pytest.mark.long(seconds=60)
def test_adapters_rise_from_below_08_to_above_082(tmp_path):
    environment = os.environ | {
        "RUN_DIR": str(tmp_path),
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "examples/lora/run.sh", "train.num_rollouts=60"],
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
    assert len(reward) == 60 and sum(reward[:10]) / 10 < 0.8 and sum(reward[-10:]) / 10 > 0.82
    assert max(row["train/logprob_gap_max"] for row in rows if "train/logprob_gap_max" in row) < 1e-3
    assert (tmp_path / "checkpoints" / "step_240" / "hf" / "model.safetensors").exists()
    assert (tmp_path / "checkpoints" / "step_240" / "hf_adapter" / "adapter_model.safetensors").exists()

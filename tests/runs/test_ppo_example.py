"""``bash examples/ppo/run.sh``, as a user runs it, for 60 of its 200 rollouts.

The reward rises, the critic learns, and both leave checkpoints. docs/ppo.md has the whole run.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from megatron_rl.checkpoint.folder import whole_checkpoints
from tests.patience import patient

ROOT = pathlib.Path(__file__).parents[2]
BOUND_S = patient(900)


@pytest.mark.long(seconds=90)
def test_ppo_rises_from_below_08_to_above_082(tmp_path):
    environment = os.environ | {
        "RUN_DIR": str(tmp_path),
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "examples/ppo/run.sh", "checkpoint.save_every_rollouts=30", "train.num_rollouts=60"],
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
    assert [row["train/applied"] for row in rows[:41]] == [0] * 40 + [
        1
    ]  # ten rollouts of four steps are the critic's alone
    losses = [row["critic/loss"] for row in rows if "critic/loss" in row]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    for root in (tmp_path / "checkpoints", tmp_path / "checkpoints" / "critic"):
        assert whole_checkpoints(root) == [30, 60]

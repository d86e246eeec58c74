"""``bash examples/ppo/run.sh``, as a user runs it, for 60 of its 200 rollouts.

The reward rises, the critic learns, and both leave checkpoints. docs/ppo.md has the whole run.
"""

from __future__ import annotations

import pytest

from megatron_rl.checkpoint.folder import whole_checkpoints
from tests.patience import patient
from tests.runs.command import run_example

BOUND_S = patient(900)


@pytest.mark.long(seconds=90)
def test_ppo_rises_from_below_08_to_above_082(tmp_path):
    given = ("checkpoint.save_every_rollouts=30", "train.num_rollouts=60")
    rows = run_example("ppo", tmp_path, *given, timeout_s=BOUND_S)
    reward = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert len(reward) == 60 and sum(reward[:10]) / 10 < 0.8 and sum(reward[-10:]) / 10 > 0.82
    assert [row["train/applied"] for row in rows[:41]] == [0] * 40 + [
        1
    ]  # ten rollouts of four steps are the critic's alone
    losses = [row["critic/loss"] for row in rows if "critic/loss" in row]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    for root in (tmp_path / "checkpoints", tmp_path / "checkpoints" / "critic"):
        assert whole_checkpoints(root) == [30, 60]

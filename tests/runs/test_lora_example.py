"""``bash examples/lora/run.sh``, as a user runs it, for 60 of its 200 rollouts.

The reward rises, and both models lie in their places. docs/lora.md has the whole run.
"""

from __future__ import annotations

import pytest

from tests.patience import patient
from tests.runs.command import run_example

BOUND_S = patient(600)


@pytest.mark.long(seconds=60)
def test_adapters_rise_from_below_08_to_above_082(tmp_path):
    rows = run_example("lora", tmp_path, "train.num_rollouts=60", timeout_s=BOUND_S)
    reward = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert len(reward) == 60 and sum(reward[:10]) / 10 < 0.8 and sum(reward[-10:]) / 10 > 0.82
    assert max(row["train/logprob_gap_max"] for row in rows if "train/logprob_gap_max" in row) < 1e-3
    assert (tmp_path / "checkpoints" / "step_240" / "hf" / "model.safetensors").exists()
    assert (tmp_path / "checkpoints" / "step_240" / "hf_adapter" / "adapter_model.safetensors").exists()

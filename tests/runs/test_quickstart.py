"""``make quickstart`` and other examples, as a user runs them, keep their promises."""

import pathlib

import pytest
from transformers import AutoModelForCausalLM

from megatron_rl.checkpoint.folder import whole_checkpoints
from tests.patience import patient
from tests.runs.command import ROOT, run_example
from tests.workers.nursery import Nursery

ONE_STEP = ROOT / "examples" / "library" / "one_step.py"
BOUND_S = patient(3000)  # some 90 s on two free cores; three lanes of a slow host took above 900


def rises(name: str, run_dir, *overrides: str) -> list[dict]:
    """Run 60 rollouts of an example's 200, whose reward rises; its document has the whole run. Return the rows."""
    rows = run_example(name, run_dir, "train.num_rollouts=60", *overrides, timeout_s=BOUND_S)
    reward = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert len(reward) == 60 and sum(reward[:10]) / 10 < 0.8 and sum(reward[-10:]) / 10 > 0.82
    return rows


@pytest.mark.long(seconds=90)
def test_quickstart_rises_from_below_06_to_above_09(tmp_path):
    rows = run_example("quickstart", tmp_path, timeout_s=BOUND_S)
    reward = [row["reward/mean"] for row in rows if "reward/mean" in row]
    dead = [row["skip/zero_advantage_ratio"] for row in rows if row["phase"] == "rl"]
    assert sum(reward[:10]) / 10 < 0.6 and sum(reward[-10:]) / 10 > 0.9
    assert sum(dead[:10]) / 10 < 0.5 < sum(dead[-40:]) / 40  # of the first 40 a host that rounds otherwise had 52 %
    real = [row for row in rows if row["phase"] == "rl" and row["step_kind"] == "REAL"]
    assert all(row["train/grad_norm"] > 0 and row.get("train/logprob_gap_max", 0.0) < 1e-3 for row in real)
    assert (tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.long(seconds=60)
def test_adapters_rise_from_below_08_to_above_082(tmp_path):
    rows = rises("lora", tmp_path)
    assert max(row["train/logprob_gap_max"] for row in rows if "train/logprob_gap_max" in row) < 1e-3
    exported = tmp_path / "checkpoints" / "step_240"
    _, loading = AutoModelForCausalLM.from_pretrained(exported / "hf", output_loading_info=True)
    assert not any(loading.values()), loading  # each stage's rank wrote a file; no tensor is missing
    assert (exported / "hf_adapter" / "adapter_model.safetensors").exists()


@pytest.mark.long(seconds=90)
def test_ppo_rises_from_below_08_to_above_082(tmp_path):
    rows = rises("ppo", tmp_path, "checkpoint.save_every_rollouts=30")
    assert [row["train/applied"] for row in rows[:41]] == [0] * 40 + [1]  # ten rollouts of four are the critic's alone
    losses = [row["critic/loss"] for row in rows if "critic/loss" in row]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    for root in (tmp_path / "checkpoints", tmp_path / "checkpoints" / "critic"):
        assert whole_checkpoints(root) == [30, 60]


def test_a_real_step_and_a_ghost_are_taken_and_the_weights_exported(nursery: Nursery, arithmetic: pathlib.Path) -> None:
    code, said = nursery.run_script(ONE_STEP, str(arithmetic / "model"), timeout_s=60)
    assert code == 0, said
    real, ghost, weights = said.splitlines()[-3:]
    assert real.startswith("rank 0: REAL, gradient norm ") and real.endswith(", 0 samples dropped")
    assert ghost == "rank 0: GHOST, gradient norm 0.0000, 4 samples dropped" and weights.endswith(" weights exported")


def test_without_a_model_it_says_how_it_is_called(nursery: Nursery) -> None:
    for arguments in ((), ("parallel.pipeline=2",)):
        code, said = nursery.run_script(ONE_STEP, *arguments, timeout_s=60)
        assert code == 2 and "Traceback" not in said
        assert "The first argument is the folder of a Hugging Face model" in said and "torchrun" in said

"""The agent example as a user starts it: a few steps, and the whole run with what its README says."""

from __future__ import annotations

import pytest

from tests.patience import patient
from tests.runs.command import run_example

pytest.importorskip("openai", reason="the extra `agent` brings it")
SHORT_S, WHOLE_S = patient(600), patient(3000)


@pytest.mark.long
def test_a_few_steps(tmp_path) -> None:
    rows = run_example(
        "agent",
        tmp_path,
        "metrics.progress=false",
        "sft.steps=12",
        "train.num_rollouts=2",
        "train.prompts_per_rollout=4",
        "train.samples_per_mini_batch=16",
        "rollout.samples_per_prompt=4",
        "eval.max_prompts=4",
        timeout_s=SHORT_S,
    )
    rl = [row for row in rows if row["phase"] == "rl" and "reward/mean" in row]
    assert len(rl) == 2 and all(row["reward/environment"] == row["reward/mean"] for row in rl)
    assert all(row["rollout/turns_mean"] >= 1 for row in rl)
    assert sum("eval/products/mean@1" in row for row in rows) == 2


@pytest.mark.long(seconds=240)
def test_the_agents_model_learns_to_call_the_calculator(tmp_path) -> None:
    """The agent is learned from, on log-probs that equal the trainer's to float32's rounding."""
    rows = run_example("agent", tmp_path, "metrics.progress=false", timeout_s=WHOLE_S)
    rl = [row for row in rows if row["phase"] == "rl" and "reward/mean" in row]
    reward, turns = [row["reward/mean"] for row in rl], [row["rollout/turns_mean"] for row in rl]
    evaluated = [row["eval/products/mean@1"] for row in rows if "eval/products/mean@1" in row]
    # Another processor rounds otherwise and so draws other samples.
    assert reward[0] < 0.4 and sum(reward[-10:]) / 10 > 0.6
    assert turns[0] < 1.6 and turns[-1] > 1.8
    assert evaluated[0] < 0.5 and evaluated[-1] > 0.75
    # float32 sums in batches of other widths: a mean of 3e-7 and a maximum of 4e-5 were seen in the whole run
    passed = [row for row in rl if "train/logprob_gap_mean" in row]  # not where no sample has signal
    assert len(passed) > 10
    assert all(0 < row["train/logprob_gap_mean"] < 1e-5 and row["train/logprob_gap_max"] < 2e-4 for row in passed)

"""The agent example as a user starts it: a few steps, and the whole run with what its README says."""

from __future__ import annotations

import pytest

from tests.runs.calculator_game import few_steps, learned

pytest.importorskip("openai", reason="the extra `agent` brings it")


@pytest.mark.long
def test_a_few_steps(tmp_path) -> None:
    few_steps("agent", tmp_path)


@pytest.mark.long(seconds=240)
def test_the_agents_model_learns_to_call_the_calculator(tmp_path) -> None:
    """The agent is learned from, on log-probs that equal the trainer's to float32's rounding."""
    passed = [
        row for row in learned("agent", tmp_path, least_turns=1.8) if "train/logprob_gap_mean" in row
    ]  # samples with signal
    assert len(passed) > 10
    # float32 sums in batches of other widths: a mean of 3e-7 and a maximum of 4e-5 were seen in the whole run
    assert all(0 < row["train/logprob_gap_mean"] < 1e-5 and row["train/logprob_gap_max"] < 2e-4 for row in passed)

"""Whole runs with a KL in the loss: the coefficient's trajectory, the reference's renewal, and a run that goes on."""

import pytest

from tests.pairwise import pairwise
from tests.runs import command
from tests.runs.command import ADAPTIVE, KL, SAVED, START, WARM, assert_same_run, firsts_of, rows_of, state_of

SAMPLES, HELD = 8 * 4, ["host", "device"]  # of a rollout; where a reference may be
LAYOUTS = ["parallel.pipeline=1", "parallel.pipeline=2"]


@pytest.mark.parametrize(("layout", "placement"), [
    ("parallel.pipeline=1", "host"), pytest.param("parallel.tensor=2", "device", marks=pytest.mark.long),
])
def test_adaptive_coefficient_of_a_run_equals_the_recurrence(made, layout, placement):
    """One step a rollout makes train/kl the rollout's KL. After a renewal it is rounding: β falls by the whole clip."""
    one_step = ("train.samples_per_mini_batch=null", "train.num_rollouts=6")
    rows, wanted = rows_of(made(2, *ADAPTIVE, *one_step, layout, f"reference.placement={placement}")), START
    assert len(rows) == 6
    for row in rows:
        assert row["train/kl_coefficient"] == pytest.approx(wanted, rel=1e-12)
        error = row["train/kl"] / command.TARGET - 1
        wanted *= 1 + min(max(error, -0.2), 0.2) * SAMPLES / command.HORIZON
    measured = [row["train/kl"] for row in rows]
    assert all(kl < 1e-9 for kl in measured[::2]) and all(kl > 1e-6 for kl in measured[1::2]), measured
    assert len({row["train/kl_coefficient"] for row in rows}) == 6


def test_a_fixed_coefficient_is_written_too_and_none_where_there_is_no_reference(made):
    assert [row.get("train/kl_coefficient") for row in rows_of(made(2, *KL, *WARM))] == [None] * 2 + [START] * 4
    for row in rows_of(made(2)):
        assert "train/kl_coefficient" not in row and "train/kl" not in row
        assert "train/entropy" in row or row["step_kind"] == "GHOST"


@pytest.mark.parametrize(("layout", "first", "then"), pairwise(LAYOUTS, HELD, HELD, kept=[(LAYOUTS[0], *HELD)]))
def test_a_run_ended_between_two_renewals_goes_on_to_the_bit(made, layout, first, then):
    """It ends after three rollouts of five: the reference is the second rollout's policy, and β has moved."""
    whole = made(2, *SAVED, *ADAPTIVE, layout, "train.num_rollouts=5", f"reference.placement={first}")
    part = made.again(whole, 3, f"reference.placement={then}")
    assert_same_run(whole, part)
    states, others = ([state_of(run, i)["reference"]["coefficient"] for i in range(6)] for run in (whole, part))
    assert states == others and states[0] == START and len(set(states)) > 3


def test_a_run_without_a_reference_cannot_go_on_with_one(made, tmp_path):
    made.into(tmp_path, 2, *SAVED, "train.num_rollouts=1")
    for said in made.into(tmp_path, 2, *SAVED, *KL, code=1):
        assert "needs the reference policy, and the checkpoint was taken without one" in said


def test_kl_in_the_reward_says_that_its_passes_drop_nothing(made, tmp_path):
    """Under skip.mode=exact a KL in the reward says that its passes drop nothing; KL and β are written."""
    said, _ = made.into(tmp_path, 2, f"loss.kl_coefficient={START}", "reference.kl_in=reward")
    assert "skip.logprob_passes turns itself off" in said
    assert {row["logprob/coverage"] for row in firsts_of(tmp_path, "logprob/coverage")} == {1.0}
    assert all(row["train/kl_coefficient"] == START for row in rows_of(tmp_path)) and firsts_of(tmp_path, "train/kl")


def test_what_does_not_go_together_is_refused_before_weights_are_read(made):
    wrong = ("reference.kl_in=reward", "loss.kl_estimator=unbiased", "loss.kl_coefficient=0.1")
    assert not (made.refused(["loss.kl_estimator=k3"], *wrong) / "config.yaml").exists()

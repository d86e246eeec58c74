"""Whole runs with a KL in the loss.

They hold the coefficient's trajectory, the reference's renewal, and a run that is ended and started again.
"""

from __future__ import annotations

import pytest
import torch

from tests.runs.command import (
    ADAPTIVE,
    HORIZON,
    KL,
    SAVED,
    START,
    TARGET,
    arguments,
    command_line,
    rows_of,
    state_of,
    timeless,
    weights_of_last,
)

SAMPLES = 8 * 4  # of a rollout


def end_of(pool, given: list[str]) -> None:
    results = pool.run(2, command_line, given, timeout_s=120)
    assert [code for code, _ in results] == [0, 0], results


@pytest.mark.parametrize(("layout", "placement"), [("parallel.pipeline=1", "host"), ("parallel.tensor=2", "device")])
def test_adaptive_coefficient_of_a_run_equals_the_recurrence(pool, arithmetic, tmp_path, layout, placement):
    """The adaptive coefficient of a run equals the recurrence.

    One step per rollout makes train/kl the rollout's KL. Just after a renewal it is rounding: β falls by the whole
    clip.
    """
    given = (
        *ADAPTIVE,
        layout,
        f"reference.placement={placement}",
        "train.samples_per_mini_batch=null",
        "train.num_rollouts=6",
    )
    end_of(pool, arguments(arithmetic, tmp_path, *given))
    rows, wanted = rows_of(tmp_path), START
    assert len(rows) == 6
    for row in rows:
        assert row["train/kl_coefficient"] == pytest.approx(wanted, rel=1e-12)
        error = row["train/kl"] / TARGET - 1
        wanted *= 1 + min(max(error, -0.2), 0.2) * SAMPLES / HORIZON
    measured = [row["train/kl"] for row in rows]
    assert all(kl < 1e-9 for kl in measured[::2]) and all(kl > 1e-6 for kl in measured[1::2]), measured
    assert len({row["train/kl_coefficient"] for row in rows}) == 6


def test_a_fixed_coefficient_is_written_too_and_none_where_there_is_no_reference(pool, arithmetic, tmp_path):
    end_of(pool, arguments(arithmetic, tmp_path / "kl", *KL, "sft.steps=1"))
    end_of(pool, arguments(arithmetic, tmp_path / "none"))
    rows = rows_of(tmp_path / "kl")
    assert [row.get("train/kl_coefficient") for row in rows] == [None] + [START] * 4
    for row in rows_of(tmp_path / "none"):
        assert "train/kl_coefficient" not in row and "train/kl" not in row
        assert "train/entropy" in row or row["step_kind"] == "GHOST"


def test_both_placements_train_the_same_run(pool, arithmetic, tmp_path):
    """Both placements of the reference train the same run, rows and weights to the bit.

    It has several steps a rollout, and two epochs.
    """
    found = {}
    for placement in ("host", "device"):
        end_of(
            pool,
            arguments(
                arithmetic,
                tmp_path / placement,
                *ADAPTIVE,
                "train.epochs_per_rollout=2",
                f"reference.placement={placement}",
            ),
        )
        found[placement] = (
            [timeless(row) for row in rows_of(tmp_path / placement)],
            weights_of_last(tmp_path / placement),
        )
    (rows, weights), (other_rows, other_weights) = found.values()
    assert rows == other_rows and all(torch.equal(weights[k], other_weights[k]) for k in weights)


PARTS = {
    "host": ("host", "host"),
    "device": ("device", "device"),
    "host-then-device": ("host", "device"),
    "device-then-host": ("device", "host"),
}


@pytest.fixture(scope="module")
def whole(pool, arithmetic, tmp_path_factory):
    """Return the undisturbed run by layout, each made once."""
    found = {}

    def run(layout: str):
        if layout not in found:
            found[layout] = tmp_path_factory.mktemp("whole")
            end_of(pool, arguments(arithmetic, found[layout], *SAVED, *ADAPTIVE, layout, "train.num_rollouts=5"))
        return found[layout]

    return run


@pytest.mark.parametrize("layout", ["parallel.pipeline=1", "parallel.pipeline=2"], ids=["DP2", "PP2"])
@pytest.mark.parametrize("name", PARTS)
def test_a_run_ended_between_two_renewals_goes_on_to_the_bit(pool, arithmetic, tmp_path, whole, name, layout):
    """A run that is ended between two renewals of its reference goes on to the bit.

    It ends after three rollouts of five: the reference of its checkpoint is the second rollout's policy, and β has
    moved.
    """
    for steps, placement in zip((3, 5), PARTS[name], strict=True):
        given = (*SAVED, *ADAPTIVE, layout, f"reference.placement={placement}", f"train.num_rollouts={steps}")
        end_of(pool, arguments(arithmetic, tmp_path, *given))
    undisturbed = whole(layout)
    one, two = weights_of_last(undisturbed), weights_of_last(tmp_path)
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert [timeless(x) for x in rows_of(undisturbed)] == [timeless(x) for x in rows_of(tmp_path)]
    states = [state_of(tmp_path, i)["reference"]["coefficient"] for i in range(6)]
    assert (
        states[0] == START
        and len(set(states)) > 3
        and states[5] == state_of(undisturbed, 5)["reference"]["coefficient"]
    )


def test_a_run_without_a_reference_cannot_go_on_with_one(pool, arithmetic, tmp_path):
    end_of(pool, arguments(arithmetic, tmp_path, *SAVED, "train.num_rollouts=1"))
    results = pool.run(
        2, command_line, arguments(arithmetic, tmp_path, *SAVED, *KL, "train.num_rollouts=2"), timeout_s=120
    )
    assert all(
        code == 1 and "needs the reference policy, and the checkpoint was taken without one" in said
        for code, said in results
    ), results


def test_kl_in_the_reward_says_that_its_passes_drop_nothing(pool, arithmetic, tmp_path):
    """Under skip.mode=exact a KL in the reward says that its passes drop nothing; KL and β are written."""
    given = arguments(arithmetic, tmp_path, f"loss.kl_coefficient={START}", "reference.kl_in=reward")
    results = pool.run(2, command_line, given, timeout_s=120)
    assert [code for code, _ in results] == [0, 0] and "skip.logprob_passes turns itself off" in results[0][1], results
    rows = rows_of(tmp_path)
    assert {row["logprob/coverage"] for row in rows if "logprob/coverage" in row} == {1.0}
    assert all(row["train/kl_coefficient"] == START for row in rows) and any("train/kl" in row for row in rows)


def test_what_does_not_go_together_is_refused_before_weights_are_read(pool, arithmetic, tmp_path):
    given = arguments(
        arithmetic, tmp_path, "reference.kl_in=reward", "loss.kl_estimator=unbiased", "loss.kl_coefficient=0.1"
    )
    ((code, said),) = pool.run(1, command_line, given, timeout_s=60)
    assert code == 2 and "loss.kl_estimator=k3" in said and "Traceback" not in said, said
    assert not (tmp_path / "config.yaml").exists()

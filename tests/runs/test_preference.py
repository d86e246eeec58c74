"""Runs on preference pairs, from the command line to the exported weights."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.checkpoint.folder import whole_checkpoints
from megatron_rl.cli import EXIT_CONFIG, EXIT_PREEMPTED
from tests.runs.command import arguments, command_line, rows_of, timeless, weights_of_last
from tests.runs.pairs import write_pairs
from tests.runs.test_supervised import told_to_leave

STEPS = 6
GIVEN = (
    f"sft.steps={STEPS}",
    "sft.lr=1e-3",
    "sft.samples_per_step=8",
    "sft.eval_share=0.1",
    "sft.eval_every_steps=3",
    "train.num_rollouts=0",
    "reward.functions=[]",
    "plan.max_tokens_per_microbatch=64",
)


@pytest.fixture(scope="module")
def pairs(arithmetic, tmp_path_factory):
    return write_pairs(arithmetic / "train.jsonl", tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


def run(pool, world, arithmetic, run_dir, pairs, *given, function=command_line, more=()):
    every = arguments(arithmetic, run_dir, *GIVEN, f"data.train={pairs}", *given)
    return pool.run(world, function, every, *more, timeout_s=120)


def test_dpo_begins_at_ln_2_and_a_signal_changes_no_bit(pool, arithmetic, tmp_path, pairs) -> None:
    """Policy and reference are one at first; the same command goes on from a signal to the whole run's bits."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    given = ("preference.loss=dpo", "sft.save_every_steps=2", "parallel.pipeline=2")
    results = run(pool, 2, arithmetic, whole, pairs, *given)
    assert [code for code, _ in results] == [0, 0], results
    rows = rows_of(whole)
    assert [row["phase"] for row in rows] == ["preference"] * STEPS
    first, last = rows[0], rows[-1]
    assert first["preference/margin"] == first["preference/accuracy"] == first["preference/eval_margin_before"] == 0
    assert first["train/loss"] == first["preference/loss"] == pytest.approx(math.log(2), abs=1e-9)
    assert last["preference/margin"] != 0 != last["preference/eval_margin"] and last["skip/samples_dropped"] == 0
    assert "preference/eval_loss" in rows[2] and "preference/eval_loss" not in rows[3]

    results = run(pool, 2, arithmetic, parts, pairs, *given, function=told_to_leave, more=(3,))
    assert [code for code, _ in results] == [EXIT_PREEMPTED] * 2, results
    assert whole_checkpoints(parts / "checkpoints" / "supervised") == [2, 3]
    results = run(pool, 2, arithmetic, parts, pairs, *given)
    assert [code for code, _ in results] == [0, 0], results
    one, two = (weights_of_last(folder) for folder in (whole, parts))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert [timeless(row) for row in rows_of(whole)] == [timeless(row) for row in rows_of(parts)]


def test_pairs_beyond_the_hinge_are_dropped_and_the_run_is_the_dense_ones(pool, arithmetic, tmp_path, pairs) -> None:
    """Under ``hinge`` pairs leave the schedule, up to ghost steps; the weights are those of the run that drops none."""
    given = ("preference.loss=hinge", "preference.beta=5", "sft.lr=3e-3")
    for mode in ("exact", "off"):
        ((code, said),) = run(pool, 1, arithmetic, tmp_path / mode, pairs, *given, f"skip.mode={mode}")
        assert code == 0, said
    exact, off = rows_of(tmp_path / "exact"), rows_of(tmp_path / "off")
    assert sum(row["skip/samples_dropped"] for row in exact) > 0 == sum(row["skip/samples_dropped"] for row in off)
    assert [row["preference/loss"] for row in exact] == pytest.approx([row["preference/loss"] for row in off], rel=1e-5)
    one, two = (weights_of_last(tmp_path / mode) for mode in ("exact", "off"))
    worst = max(float((one[name] - two[name]).abs().max()) for name in one)
    assert worst < 1e-5, worst  # micro-batches of other sizes round otherwise


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("preference.loss=dpo", "sft.steps=0"), "preference.loss=dpo is trained by the steps of sft"),
        (("preference.loss=dop",), "preference.loss='dop'"),
        (("preference.loss=simpo", "preference.beta=0"), "preference.beta=0"),
        (("preference.loss=dpo", "rollout.temperature=0.7"), "rollout.temperature=0.7 divides the logits"),
        (("preference.loss=dpo", "preference.chosen_key=best"), "no column 'best' (preference.chosen_key)"),
        (("preference.loss=bradley_terry", "train.num_rollouts=2"), "and train.num_rollouts=2; set it to 0"),
        (("preference.loss=bradley_terry", "lora.rank=4"), "and lora.rank=4; set it to null"),
    ],
)
def test_settings_that_contradict_are_named(pool, arithmetic, tmp_path, pairs, given, message) -> None:
    more = ("reward.functions=[arithmetic]",) if "train.num_rollouts=2" in given else ()
    ((code, said),) = run(pool, 1, arithmetic, tmp_path, pairs, *given, *more)
    assert code == EXIT_CONFIG and message in said, said

"""Runs on preference pairs, from the command line to the exported weights."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from megatron_rl.checkpoint.folder import whole_checkpoints
from megatron_rl.cli import EXIT_CONFIG, EXIT_PREEMPTED
from tests.runs.command import PPO, arguments, command_line, rows_of, timeless, told_to_leave, weights_of_last
from tests.runs.pairs import write_pairs

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


@pytest.mark.parametrize("loss", ["dpo", "bradley_terry"])
def test_a_run_begins_at_ln_2_and_a_signal_changes_no_bit(pool, arithmetic, tmp_path, pairs, loss: str) -> None:
    """Policy and reference are one at first, a reward model's head is 0; a signal's end is gone on from to the bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    given = (f"preference.loss={loss}", "sft.save_every_steps=2", "parallel.pipeline=2")
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
    assert worst < 3e-5, worst  # a hundredth of a step: micro-batches of other sizes round otherwise


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


def test_a_reward_model_serves_transformers_a_reward_function_and_a_critic(pool, arithmetic, tmp_path, pairs) -> None:
    """The exported directory is a sequence classifier; rollouts are scored by it, and PPO's critic begins with it."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from megatron_rl.reward.reward_model import RewardModelScore

    given = ("preference.loss=bradley_terry", "parallel.tensor=2", "sft.lr=3e-3")
    ((code, said), _) = run(pool, 2, arithmetic, tmp_path / "judge", pairs, *given)
    assert code == 0, said
    first, last = rows_of(tmp_path / "judge")[0], rows_of(tmp_path / "judge")[-1]
    assert first["train/loss"] == pytest.approx(math.log(2), abs=1e-9)  # the head begins at 0: every score is 0
    assert last["preference/eval_chosen_reward"] != 0 and last["preference/eval_loss"] < 1
    exported = tmp_path / "judge" / "checkpoints" / f"step_{STEPS}" / "hf"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    classifier = AutoModelForSequenceClassification.from_pretrained(exported)
    assert classifier.config.num_labels == 1 and classifier.config.pad_token_id != tokenizer.eos_token_id

    rows = [json.loads(line) for line in pairs.read_text().splitlines()][:20]
    texts = [(row["prompt"], row[side]) for row in rows for side in ("chosen", "rejected")]
    ids = [[*tokenizer(answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id] for _, answer in texts]
    found = RewardModelScore(exported)(
        prompts=[prompt for prompt, _ in texts], completions=[answer for _, answer in texts], completion_ids=ids
    )
    with torch.no_grad():
        wanted = [
            float(classifier(torch.tensor([[*tokenizer(prompt, add_special_tokens=False).input_ids, *own]])).logits)
            for (prompt, _), own in zip(texts, ids, strict=True)
        ]
    np.testing.assert_allclose(found, wanted, atol=1e-5)  # float32 in passes of other lengths
    assert len({round(x, 4) for x in found}) > 20

    scored = ("reward.functions=[reward_model]", f"reward.model_path={exported}", "train.num_rollouts=1")
    ((code, said),) = pool.run(1, command_line, arguments(arithmetic, tmp_path / "rl", *scored), timeout_s=120)
    assert code == 0, said
    assert rows_of(tmp_path / "rl")[0]["reward/std"] > 0
    ppo = (*PPO, f"critic.hf_path={exported}", "train.num_rollouts=1")
    ((code, said),) = pool.run(1, command_line, arguments(arithmetic, tmp_path / "ppo", *ppo), timeout_s=120)
    assert code == 0, said
    assert rows_of(tmp_path / "ppo")[0]["critic/value_mean"] != 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("reward.functions=[reward_model]",), "give both, or neither"),
        (("reward.functions=[reward_model]", "reward.model_path=nowhere"), "reward.model_path='nowhere' holds no"),
        (("reward.functions=[reward_model]", "reward.model_path={policy}"), "is no reward model"),
        (
            ("reward.functions=[reward_model,arithmetic]", "reward.model_path={policy}", "reward.num_workers=1"),
            "reward.in_process=[reward_model]",
        ),
    ],
)
def test_reward_models_that_cannot_score_are_named(pool, arithmetic, tmp_path, given, message) -> None:
    given = [part.format(policy=arithmetic / "model") for part in given]
    ((code, said),) = pool.run(1, command_line, arguments(arithmetic, tmp_path, *given), timeout_s=60)
    assert code == EXIT_CONFIG and message in said, said

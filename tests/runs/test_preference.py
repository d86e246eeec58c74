"""Runs on preference pairs, from the command line to the exported weights."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megatron_rl.checkpoint.folder import whole_checkpoints
from megatron_rl.cli import EXIT_PREEMPTED
from megatron_rl.reward.reward_model import RewardModelScore
from tests.pairwise import quick
from tests.runs.command import PPO, assert_same_run, rows_of, told_to_leave, weights_of, write_pairs

STEPS = 6
GIVEN = (f"sft.steps={STEPS}", "sft.lr=1e-3", "sft.samples_per_step=8", "sft.eval_share=0.1", "sft.eval_every_steps=3",
         "train.num_rollouts=0", "reward.functions=[]", "plan.max_tokens_per_microbatch=64")


@pytest.fixture(scope="module")
def given(arithmetic, tmp_path_factory) -> tuple[str, ...]:
    """Return the overrides of a run on preference pairs."""
    pairs = write_pairs(arithmetic / "train.jsonl", tmp_path_factory.mktemp("pairs") / "pairs.jsonl")
    return (*GIVEN, f"data.train={pairs}")


@pytest.mark.parametrize("loss", quick(["dpo", "bradley_terry"], "dpo"))
def test_a_run_begins_at_ln_2_and_a_signal_changes_no_bit(made, tmp_path, given, loss: str) -> None:
    """Policy and reference are one at first, a reward model's head is 0; a signal's end is gone on from to the bit."""
    given = (*given, f"preference.loss={loss}", "sft.save_every_steps=2", "parallel.pipeline=2")
    whole = made(2, *given)
    rows = rows_of(whole)
    assert [row["phase"] for row in rows] == ["preference"] * STEPS
    first, last = rows[0], rows[-1]
    assert first["preference/margin"] == first["preference/accuracy"] == first["preference/eval_margin_before"] == 0
    assert first["train/loss"] == first["preference/loss"] == pytest.approx(math.log(2), abs=1e-9)
    assert last["preference/margin"] != 0 != last["preference/eval_margin"] and last["skip/samples_dropped"] == 0
    assert "preference/eval_loss" in rows[2] and "preference/eval_loss" not in rows[3]
    made.into(tmp_path, 2, *given, run=told_to_leave, more=(3,), code=EXIT_PREEMPTED)
    assert whole_checkpoints(tmp_path / "checkpoints" / "supervised") == [2, 3]
    made.into(tmp_path, 2, *given)
    assert_same_run(whole, tmp_path)


def test_pairs_beyond_the_hinge_are_dropped_and_the_run_is_the_dense_ones(made, given) -> None:
    """Under ``hinge`` pairs leave the schedule, up to ghost steps; the weights are those of the run that drops none."""
    given = (*given, "preference.loss=hinge", "preference.beta=5", "sft.lr=3e-3")
    runs = made(1, *given, "skip.mode=exact"), made(1, *given, "skip.mode=off")
    exact, off = map(rows_of, runs)
    assert sum(row["skip/samples_dropped"] for row in exact) > 0 == sum(row["skip/samples_dropped"] for row in off)
    assert [row["preference/loss"] for row in exact] == pytest.approx([row["preference/loss"] for row in off], rel=1e-5)
    one, two = map(weights_of, runs)
    worst = max(float((one[name] - two[name]).abs().max()) for name in one)
    assert worst < 3e-5, worst  # a hundredth of a step: micro-batches of other sizes round otherwise


def test_a_reward_model_serves_transformers_a_reward_function_and_a_critic(made, arithmetic, given) -> None:
    """The exported directory is a sequence classifier; rollouts are scored by it, and PPO's critic begins with it."""
    judge = made(2, *given, "preference.loss=bradley_terry", "parallel.tensor=2", "sft.lr=3e-3")
    first, *_, last = rows_of(judge)
    assert first["train/loss"] == pytest.approx(math.log(2), abs=1e-9)  # the head begins at 0: every score is 0
    assert last["preference/eval_chosen_reward"] != 0 and last["preference/eval_loss"] < 1
    exported = judge / "checkpoints" / f"step_{STEPS}" / "hf"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    classifier = AutoModelForSequenceClassification.from_pretrained(exported)
    assert classifier.config.num_labels == 1 and classifier.config.pad_token_id != tokenizer.eos_token_id
    rows = [json.loads(line) for line in (arithmetic / "train.jsonl").read_text().splitlines()][:20]
    texts = [(row["prompt"], answer) for row in rows for answer in (row["answer"], str(int(row["answer"]) + 1))]
    ids = [[*tokenizer(answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id] for _, answer in texts]
    prompts, answers = zip(*texts, strict=True)
    found = RewardModelScore(exported)(prompts=list(prompts), completions=list(answers), completion_ids=ids)
    with torch.no_grad():
        wanted = [
            float(classifier(torch.tensor([[*tokenizer(prompt, add_special_tokens=False).input_ids, *own]])).logits)
            for (prompt, _), own in zip(texts, ids, strict=True)
        ]
    np.testing.assert_allclose(found, wanted, atol=1e-5)  # float32 in passes of other lengths
    assert len({round(x, 4) for x in found}) > 20
    once = "train.num_rollouts=1"
    scored = made(1, "reward.functions=[reward_model]", f"reward.model_path={exported}", once)
    assert rows_of(scored)[0]["reward/std"] > 0
    assert rows_of(made(1, *PPO, f"critic.hf_path={exported}", once))[0]["critic/value_mean"] != 0

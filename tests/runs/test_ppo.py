"""Every layout trains the same PPO run, a kill changes nothing, and a warm-up leaves the policy alone."""

import json
import math
import shutil

import pytest

from megatron_rl.checkpoint.folder import whole_checkpoints
from tests.pairwise import quick
from tests.runs.command import PPO, SAVED, WARM, apart, assert_same_run, firsts_of, rows_of

KL = ("loss.kl_coefficient=0.1", "reference.kl_in=reward", "loss.kl_estimator=k3", *WARM)
APART = ("parallel.pipeline=2", "critic.parallel.pipeline=1", "critic.parallel.tensor=2")
LAYOUTS = [("parallel.tensor=2",), APART, ("critic.parallel.pipeline=2",)]
PARTS = {"stages": ("parallel.pipeline=2", "critic.parallel.pipeline=1"),
         "sharded-kl": ("optimizer.distributed=true", *KL)}


def test_a_run_leaves_a_critics_metrics(made):
    run = made(1, *PPO)
    rows, firsts = rows_of(run), firsts_of(run, "critic/loss")
    assert [row["step"] for row in rows] == list(range(1, 9))  # 2 rollouts of 16 samples, mini-batches of 8, 2 epochs
    assert len(firsts) == 2 and all(row["critic/steps"] == 2 and row["time/critic_s"] > 0 for row in firsts)
    assert abs(firsts[0]["critic/value_mean"]) < 0.05 < firsts[0]["critic/return_mean"]  # a fresh head, and one step
    assert all(math.isfinite(row["critic/grad_norm"]) and row["critic/grad_norm"] > 0 for row in firsts)
    assert all(row["skip/samples_dropped"] == 0 and row["step_kind"] == "REAL" for row in rows)


@pytest.mark.parametrize("layout", quick(LAYOUTS, APART), ids=str)
def test_every_layout_trains_the_same_run(made, layout):
    """Weights are equal to rounding, which AdamW amplifies (test_train.py)."""
    run, alone = made(2, *PPO, *layout), made(1, *PPO)
    assert apart(alone, run) < 1e-5
    for row, wanted in zip(rows_of(run), rows_of(alone), strict=True):
        for name in ("train/loss", "critic/loss", "critic/return_mean", "critic/value_mean", "critic/grad_norm"):
            close = pytest.approx(wanted.get(name, 0.0), rel=2e-3, abs=2e-5)
            assert (name in row) == (name in wanted) and row.get(name, 0.0) == close


@pytest.mark.parametrize("name", quick(PARTS, "sharded-kl"))
def test_a_run_in_two_parts_equals_the_whole_one(made, name):
    whole = made(2, *PPO, *SAVED, *PARTS[name], "train.num_rollouts=2")
    part = made.again(whole, 1)
    for root in (whole / "checkpoints", part / "checkpoints"):
        assert whole_checkpoints(root) == whole_checkpoints(root / "critic") == [0, 1, 2]
    assert_same_run(whole, part)


def test_a_warm_up_trains_the_critic_alone(made):
    warmup = ("critic.warmup_rollouts=2", "critic.init=policy", "sft.steps=1", "train.num_rollouts=3")
    rl = [row for row in rows_of(made(2, *PPO, *warmup)) if row["phase"] == "rl"]
    held, trained = rl[:8], rl[8:]
    assert {row["weight_version"] for row in held} == {1} and all(row["train/applied"] == 0 for row in held)
    assert all(row["skip/tokens_executed"] == 0 and row["step_kind"] == "HELD" for row in held)
    assert [row["critic/steps"] for row in rl if "critic/steps" in row] == [2, 2, 2]
    assert all(row["train/applied"] == 1 and row["train/grad_norm"] > 0 for row in trained)


def test_an_adaptive_coefficient_waits_for_the_policy(made):
    """The KL in the reward of a held rollout is that of a policy that has not moved: it moves no coefficient."""
    adaptive = (*KL, "reference.controller=adaptive", "reference.kl_horizon=50", "reference.kl_target=1e-9",
                "critic.warmup_rollouts=2", "train.num_rollouts=4")
    firsts = firsts_of(made(1, *PPO, *adaptive), "reward/kl_penalty")
    betas = [row["train/kl_coefficient"] for row in firsts]
    assert len(betas) == 4 and betas[:3] == [0.1] * 3 and betas[3] != 0.1
    assert firsts[0]["reward/kl_penalty"] == pytest.approx(0.0, abs=1e-4)


def test_a_folder_of_a_policy_alone_is_named_or_set_aside(made, tmp_path):
    once = (*SAVED, "train.num_rollouts=1")
    made.into(tmp_path, 1, *once)
    (said,) = made.into(tmp_path, 1, *once, *PPO, code=1)
    assert "none of a critic that belong to them" in said
    made.into(tmp_path, 1, *PPO, *once, "checkpoint.resume=never")
    assert whole_checkpoints(tmp_path / "checkpoints" / "critic") == [0, 1] and (tmp_path / "checkpoints.1").is_dir()


@pytest.mark.parametrize(("name", "value", "said"), [
    ("vocab_size", 3, "a vocabulary of 3"),
    ("max_position_embeddings", 8, "is more than the context of critic.hf_path"),
])
def test_a_critic_that_cannot_read_the_policys_tokens_is_named(made, arithmetic, tmp_path, name, value, said):
    """Its vocabulary is below the policy's, or its context below a prompt's and its response's."""
    shutil.copytree(arithmetic / "model", tmp_path / "critic")
    path = tmp_path / "critic" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    made.refused([said], *PPO, f"critic.hf_path={path.parent}")

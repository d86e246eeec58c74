"""Whole PPO runs: layouts, kills, values and warm-up.

Every layout trains the same run, a kill changes nothing, values are learned, and a warm-up leaves the policy alone.
"""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch

from megatron_rl.checkpoint.folder import whole_checkpoints
from tests.runs.command import PPO, SAVED, arguments, command_line, rows_of, timeless, weights_of, weights_of_last

KL = ("loss.kl_coefficient=0.1", "reference.kl_in=reward", "loss.kl_estimator=k3", "sft.steps=2")


def run(pool, world: int, folder, arithmetic, *overrides: str) -> list[dict]:
    results = pool.run(world, command_line, arguments(arithmetic, folder, *PPO, *overrides), timeout_s=120)
    assert [code for code, _ in results] == [0] * world, results
    return rows_of(folder)


def test_a_run_leaves_a_critics_metrics(pool, arithmetic, tmp_path):
    rows = run(pool, 1, tmp_path, arithmetic, "train.num_rollouts=3")
    assert [row["step"] for row in rows] == list(range(1, 13))  # 3 rollouts of 16 samples, mini-batches of 8, 2 epochs
    firsts = [row for row in rows if "critic/loss" in row]
    assert len(firsts) == 3 and all(row["critic/steps"] == 2 and row["time/critic_s"] > 0 for row in firsts)
    assert abs(firsts[0]["critic/value_mean"]) < 0.05 < firsts[0]["critic/return_mean"]  # a fresh head, and one step
    assert all(math.isfinite(row["critic/grad_norm"]) and row["critic/grad_norm"] > 0 for row in firsts)
    assert all(row["skip/samples_dropped"] == 0 and row["step_kind"] == "REAL" for row in rows)


def test_every_layout_trains_the_same_run(pool, arithmetic, tmp_path):
    """Every layout of the policy and of the critic, apart and together, trains the same run.

    Weights are equal to rounding, which AdamW amplifies (test_train.py).
    """
    layouts = [
        (1, ()),
        (2, ("parallel.tensor=2",)),
        (2, ("parallel.pipeline=2", "critic.parallel.pipeline=1", "critic.parallel.tensor=2")),
        (2, ("critic.parallel.pipeline=2",)),
    ]
    found = []
    for number, (world, layout) in enumerate(layouts):
        rows = run(pool, world, tmp_path / str(number), arithmetic, *layout)
        found.append((torch.cat([x.flatten() for x in weights_of(tmp_path / str(number)).values()]), rows))
    for weights, rows in found[1:]:
        assert (weights - found[0][0]).norm() / found[0][0].norm() < 1e-5
        for row, wanted in zip(rows, found[0][1], strict=True):
            for name in ("train/loss", "critic/loss", "critic/return_mean", "critic/value_mean", "critic/grad_norm"):
                assert (name in row) == (name in wanted) and row.get(name, 0.0) == pytest.approx(
                    wanted.get(name, 0.0), rel=2e-3, abs=2e-5
                )


@pytest.mark.parametrize(
    "layout", [("parallel.pipeline=2", "critic.parallel.pipeline=1"), ("optimizer.distributed=true", *KL)]
)
def test_a_run_in_two_parts_equals_the_whole_one(pool, arithmetic, tmp_path, layout):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, steps in ((whole, 4), (parts, 2), (parts, 4)):
        run(pool, 2, folder, arithmetic, *SAVED, *layout, f"train.num_rollouts={steps}")
    for root in (whole / "checkpoints", parts / "checkpoints"):
        assert whole_checkpoints(root) == whole_checkpoints(root / "critic") == [0, 1, 2, 3, 4]
    one, two = (weights_of_last(x) for x in (whole, parts))
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert [timeless(x) for x in rows_of(whole)] == [timeless(x) for x in rows_of(parts)]


def test_a_warm_up_trains_the_critic_alone(pool, arithmetic, tmp_path):
    rows = run(
        pool,
        2,
        tmp_path,
        arithmetic,
        "train.num_rollouts=3",
        "critic.warmup_rollouts=2",
        "critic.init=policy",
        "sft.steps=1",
    )
    rl = [row for row in rows if row["phase"] == "rl"]
    held, trained = rl[:8], rl[8:]
    assert {row["weight_version"] for row in held} == {1} and all(row["train/applied"] == 0 for row in held)
    assert all(row["skip/tokens_executed"] == 0 and row["step_kind"] == "HELD" for row in held)
    assert [row["critic/steps"] for row in rl if "critic/steps" in row] == [2, 2, 2]
    assert all(row["train/applied"] == 1 and row["train/grad_norm"] > 0 for row in trained)


def test_an_adaptive_coefficient_waits_for_the_policy(pool, arithmetic, tmp_path):
    """An adaptive coefficient waits for the policy.

    The KL in the reward of a held rollout is that of a policy that has not moved: it moves no coefficient.
    """
    adaptive = (
        *KL,
        "reference.controller=adaptive",
        "reference.kl_horizon=50",
        "reference.kl_target=1e-9",
        "critic.warmup_rollouts=2",
    )
    rows = [
        row for row in run(pool, 1, tmp_path, arithmetic, *adaptive, "train.num_rollouts=5") if row["phase"] == "rl"
    ]
    betas = [rows[4 * k]["train/kl_coefficient"] for k in range(5)]
    assert betas[:3] == [0.1] * 3 and betas[3] != 0.1
    assert all("reward/kl_penalty" in rows[4 * k] for k in range(5)) and rows[0]["reward/kl_penalty"] == pytest.approx(
        0.0, abs=1e-4
    )


def test_a_folder_of_a_policy_alone_is_named_or_set_aside(pool, arithmetic, tmp_path):
    saved = arguments(arithmetic, tmp_path, *SAVED, "train.num_rollouts=1")
    assert pool.run(1, command_line, saved, timeout_s=60)[0][0] == 0
    ((code, said),) = pool.run(1, command_line, arguments(arithmetic, tmp_path, *SAVED, *PPO), timeout_s=60)
    assert code == 1 and "none of a critic that belong to them" in said
    run(pool, 1, tmp_path, arithmetic, *SAVED, "checkpoint.resume=never", "train.num_rollouts=1")
    assert whole_checkpoints(tmp_path / "checkpoints" / "critic") == [0, 1] and (tmp_path / "checkpoints.1").is_dir()


def test_a_critic_that_cannot_read_the_policys_tokens_is_named(pool, arithmetic, tmp_path):
    """A critic that cannot read the policy's tokens is named.

    Its vocabulary is below the policy's, or its context below a prompt's and its response's.
    """
    for name, value, said in (
        ("vocab_size", 3, "a vocabulary of 3"),
        ("max_position_embeddings", 8, "is more than the context of critic.hf_path"),
    ):
        folder = tmp_path / name
        shutil.copytree(arithmetic / "model", folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, name: value}))
        given = arguments(arithmetic, tmp_path / "run", *PPO, f"critic.hf_path={folder}")
        ((code, told),) = pool.run(1, command_line, given, timeout_s=60)
        assert code == 2 and said in told, told

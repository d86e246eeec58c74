"""Runs of on-policy distillation, from the command line to the metrics: a teacher here and one behind a server."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.cli import EXIT_CONFIG, EXIT_FAILED
from tests.runs.command import arguments, command_line, rows_of, timeless, weights_of_last
from tests.runs.teacher_server import teacher_server

GIVEN = (
    "advantage.estimator=distillation",
    "loss.policy=importance_sampling",
    "reward.functions=[]",
    "rollout.samples_per_prompt=2",
    "train.samples_per_mini_batch=8",
    "optimizer.lr=1e-3",
    "optimizer.schedule=constant",
    "metrics.log_completions=0",
)


@pytest.fixture(scope="module")
def teacher(arithmetic, tmp_path_factory):
    """Make a teacher of another width and depth over the same tokenizer, with logits far from uniform."""
    import copy

    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    path = tmp_path_factory.mktemp("teacher") / "hf"
    config = copy.deepcopy(AutoConfig.from_pretrained(arithmetic / "model"))
    config.hidden_size, config.num_hidden_layers, config.intermediate_size = 32, 4, 48
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        config.layer_types = ["full_attention"] * 4
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(5.0 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(arithmetic / "model").save_pretrained(path)
    return path


def run(pool, world, arithmetic, run_dir, *given):
    return pool.run(world, command_line, arguments(arithmetic, run_dir, *GIVEN, *given), timeout_s=120)


def test_a_teacher_of_equal_weights_gives_no_signal(pool, arithmetic, tmp_path) -> None:
    """The policy's own weights as teacher: every gap is exactly 0, every step a ghost; nothing is learned."""
    ((code, said),) = run(pool, 1, arithmetic, tmp_path, f"teacher.hf_path={arithmetic / 'model'}")
    assert code == 0, said
    rows = rows_of(tmp_path)
    assert [row["step_kind"] for row in rows] == ["GHOST"] * len(rows) and len(rows) == 4
    assert all(row["distillation/reverse_kl"] == 0 for row in rows if "distillation/reverse_kl" in row)
    assert all(row["skip/zero_advantage_ratio"] == 1 for row in rows)


def test_a_server_trains_the_run_that_weights_here_train(pool, arithmetic, tmp_path, teacher) -> None:
    """One teacher held by the ranks, over two pipeline stages, and by a server: equal gaps, rewards none."""
    results = run(pool, 2, arithmetic, tmp_path / "here", f"teacher.hf_path={teacher}", "parallel.pipeline=2")
    assert [code for code, _ in results] == [0, 0], results
    with teacher_server(teacher, fails=1) as (url, seen):  # the first request's answer is an error, and is asked again
        results = run(pool, 2, arithmetic, tmp_path / "served", f"teacher.servers=[{url}]", "teacher.request_s=20")
    assert [code for code, _ in results] == [0, 0], results
    assert all(body["model"] == "the-teacher" and body["prompt_logprobs"] == 0 for body in seen)
    here, served = rows_of(tmp_path / "here"), rows_of(tmp_path / "served")
    assert len(seen) == 2 * 16 + 1 and len(here) == len(served) == 4
    for one, two in zip(here, served, strict=True):
        assert "reward/mean" not in one and one["step_kind"] == "REAL"
        for name in ("distillation/reverse_kl", "train/loss", "train/grad_norm"):
            assert (name in one) == (name in two)
            if name in one:
                assert math.isfinite(one[name]) and one[name] == pytest.approx(two[name], rel=1e-3)
    assert here[0]["distillation/reverse_kl"] > 0.01 and "time/teacher_s" in here[0]


def test_a_run_that_goes_on_from_a_checkpoint_equals_the_whole_one(pool, arithmetic, tmp_path, teacher) -> None:
    given = (f"teacher.hf_path={teacher}", "checkpoint.save_every_rollouts=1", "train.num_rollouts=2")
    for folder, rollouts in (("whole", 2), ("parts", 1), ("parts", 2)):
        ((code, said),) = run(pool, 1, arithmetic, tmp_path / folder, *given, f"train.num_rollouts={rollouts}")
        assert code == 0, said
    whole, parts = (weights_of_last(tmp_path / folder) for folder in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert [timeless(row) for row in rows_of(tmp_path / "whole")] == [
        timeless(row) for row in rows_of(tmp_path / "parts")
    ]


def test_a_reward_beside_a_teacher_is_measured_and_not_trained(pool, arithmetic, tmp_path, teacher) -> None:
    given = (f"teacher.hf_path={teacher}",)
    for folder, more in (("plain", ()), ("scored", ("reward.functions=[tests.reward_functions:parity]",))):
        ((code, said),) = run(pool, 1, arithmetic, tmp_path / folder, *given, *more)
        assert code == 0, said
    plain, scored = (weights_of_last(tmp_path / folder) for folder in ("plain", "scored"))
    assert all(torch.equal(plain[name], scored[name]) for name in plain)
    assert "reward/mean" in rows_of(tmp_path / "scored")[0]


def test_servers_that_do_not_answer_end_the_run_by_name(pool, arithmetic, tmp_path, teacher) -> None:
    with teacher_server(teacher, cuts=True) as (url, _):
        results = run(pool, 2, arithmetic, tmp_path / "cut", f"teacher.servers=[{url}]", "teacher.request_s=20")
    assert [code for code, _ in results] == [EXIT_FAILED] * 2
    said = results[0][1]
    assert "no teacher scored sample" in said and "is it a vLLM server of the policy's tokenizer?" in said
    ((code, said),) = run(pool, 1, arithmetic, tmp_path / "gone", f"teacher.servers=[{url}]", "teacher.request_s=20")
    assert code == EXIT_FAILED and "connection refused" in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "advantage.estimator=distillation has no teacher"),
        (("teacher.hf_path=nowhere",), "teacher.hf_path='nowhere' holds no config.json"),
        (("teacher.hf_path=a", "teacher.servers=[http://b:1]"), "both name the teacher; give one"),
        (
            ("advantage.estimator=grpo", "teacher.discount=0.5"),
            "teacher.discount=0.5 and advantage.estimator=grpo has no",
        ),
        (("teacher.servers=[http://b:1]", "rollout.temperature=0.5"), "which give log-probs at 1"),
        (
            ("teacher.servers=[http://b:1]", "teacher.request_s=20", "replay.capacity_groups=4"),
            "about groups without signal",
        ),
        (("teacher.servers=[b]", "teacher.request_s=20"), "which is no server's address"),
    ],
)
def test_settings_that_contradict_are_named(pool, arithmetic, tmp_path, given, message) -> None:
    more = ("reward.functions=[arithmetic]",) if "advantage.estimator=grpo" in given else ()
    ((code, said),) = run(pool, 1, arithmetic, tmp_path, *given, *more)
    assert code == EXIT_CONFIG and message in said, said

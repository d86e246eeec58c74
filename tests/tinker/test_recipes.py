"""Recipes of tinker-cookbook 0.5.8 and 0.6.1, as they are published, train on a server of two processes."""

from __future__ import annotations

import json
import math
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("tinker_cookbook", reason="tinker-cookbook is not installed; `make test-tinker` installs it")

from tests.patience import patient
from tests.tinker.workplace import CHAT

NEWER = pathlib.Path(sys.prefix) / "cookbook-0.6.1"
BOUND_S = patient(240.0)
SMALL = ("lora_rank=8", "max_steps=2")
SUMS = ("renderer_name=qwen3", "group_size=4", "groups_per_batch=4", "save_every=1", *SMALL)
SUPERVISED = ("lora_rank=8", "batch_size=8", "max_length=256", "learning_rate=0.01", "save_every=2", "max_steps=4")


class Cookbook:
    """Runs recipes of one release and reads what they leave."""

    def __init__(self, version: str, workplace: pathlib.Path, address: str) -> None:
        self.version, self.workplace, self.address = version, workplace, address

    def run(self, recipe: str, log: pathlib.Path, *arguments: str, own_url: bool = True) -> list[dict]:
        """Run ``python -m tinker_cookbook.recipes.<recipe>``; return the rows of its metrics.jsonl."""
        if self.version == "0.6.1":
            assert NEWER.is_dir(), f"{NEWER} is missing; `make test-tinker` makes it"
        given = [f"model_name={CHAT}", *arguments, *([f"base_url={self.address}"] if own_url else [])]
        path = str(NEWER) if self.version == "0.6.1" else ""
        done = subprocess.run(
            [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", f"log_path={log}", *given],
            cwd=self.workplace, env={**os.environ, "PYTHONPATH": path, "TINKER_BASE_URL": self.address,
                 "HF_DATASETS_CACHE": str(self.workplace / "datasets")},
            capture_output=True, text=True, timeout=BOUND_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", params=["0.5.8", "0.6.1"])
def cookbook(request, workplace, address) -> Cookbook:
    return Cookbook(request.param, workplace, address)


def found(rows: list[dict], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def test_versions(cookbook: Cookbook) -> None:
    path = str(NEWER) if cookbook.version == "0.6.1" else ""
    code = "import tinker, tinker_cookbook as c; print(tinker.__version__, c.__file__)"
    said = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    ).stdout.split()
    assert said[0] == "0.38.0" and ("cookbook-0.6.1" in said[1]) == (cookbook.version == "0.6.1")


def test_sl_loop_learns_and_goes_on_from_its_checkpoint(cookbook: Cookbook, tmp_path: pathlib.Path) -> None:
    whole = cookbook.run("sl_loop", tmp_path / "whole", *SUPERVISED)
    losses = found(whole, "train_mean_nll")
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)
    # as after a crash in step 3: the checkpoint before it is the last line
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    lines = (tmp_path / "whole" / "checkpoints.jsonl").read_text().splitlines()
    (tmp_path / "cut" / "checkpoints.jsonl").write_text(lines[0] + "\n")
    (tmp_path / "cut" / "metrics.jsonl").unlink()
    again = cookbook.run("sl_loop", tmp_path / "cut", *SUPERVISED)
    assert [row["step"] for row in again] == [2, 3]
    assert found(again, "train_mean_nll") == losses[2:]


def test_rl_loop(cookbook: Cookbook, tmp_path: pathlib.Path) -> None:
    loss = ["loss_fn=importance_sampling"] if cookbook.version == "0.6.1" else []  # its default is stable_reinforce
    small = ("batch_size=4", "group_size=4", "max_tokens=8", "save_every=1", *SMALL)
    rows = cookbook.run("rl_loop", tmp_path / "log", *small, *loss)
    assert [row["step"] for row in rows] == [0, 1]
    saved = [json.loads(line)["name"] for line in (tmp_path / "log" / "checkpoints.jsonl").read_text().splitlines()]
    assert saved == ["000001", "final"]


@pytest.mark.parametrize("env", ["arithmetic", "gsm8k"])
def test_math_rl_with_its_evaluator(cookbook: Cookbook, tmp_path: pathlib.Path, env: str) -> None:
    loss = ["loss_fn=importance_sampling"] if cookbook.version == "0.6.1" else []  # as of rl_loop
    rows = cookbook.run("math_rl.train", tmp_path / "log", f"env={env}", "max_tokens=5", "eval_every=1", *SUMS, *loss)
    assert len(rows) >= 2
    assert max(abs(x) for x in found(rows, "optim/kl_sample_train_v2")) < 1e-8  # sampler and trainer are one policy
    if env == "gsm8k":  # the data set of sums has no held-out part
        assert len(found(rows, "test/env/all/reward/total")) >= 2


def test_direct_preference_optimisation(cookbook: Cookbook, tmp_path: pathlib.Path) -> None:
    given = (
        "dataset=hhh",
        "renderer_name=qwen3",
        "max_length=512",
        "batch_size=8",
        "learning_rate=1e-3",
        "max_steps=3",
    )
    rows = cookbook.run("preference.dpo.train", tmp_path / "log", *given)
    losses = found(rows, "dpo_loss")
    assert losses[0] == pytest.approx(math.log(2.0), abs=1e-6)  # policy and reference are one model
    assert losses[-1] < losses[0] and found(rows, "test/nll")


def test_on_policy_distillation(cookbook: Cookbook, tmp_path: pathlib.Path) -> None:
    given = (f"teacher_model={CHAT}", "renderer_name=qwen3", "dataset=deepmath", "group_size=2", "groups_per_batch=4")
    rows = cookbook.run("distillation.on_policy_distillation", tmp_path / "log", *given, "max_tokens=8", *SMALL)
    assert found(rows, "teacher_kl")[0] == pytest.approx(0.0, abs=1e-6)  # the teacher is the student's start
    assert max(abs(x) for x in found(rows, "optim/kl_sample_train_v2")) < 1e-8


def test_several_turns(cookbook: Cookbook, tmp_path: pathlib.Path) -> None:
    given = ("renderer_name=qwen3", "group_size=2", "batch_size=1", "max_tokens=4", "eval_every=0", "save_every=1")
    rows = cookbook.run(
        "multiplayer_rl.guess_number.train", tmp_path / "log", *given, "max_steps=1", own_url=False
    )  # fmt: skip
    assert found(rows, "env/all/turns_per_episode")[0] > 1.0

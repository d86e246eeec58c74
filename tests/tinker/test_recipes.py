"""Recipes of tinker-cookbook 0.5.8 and 0.6.1, as they are published, train on a server of two processes."""

import json
import math
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("tinker_cookbook", reason="tinker-cookbook is not installed; `make test-tinker` installs it")

from tests.pairwise import quick
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

    def python(self, *arguments: str) -> str:
        """Run an interpreter that finds this release of the cookbook; return what it printed."""
        assert self.version == "0.5.8" or NEWER.is_dir(), f"{NEWER} is missing; `make test-tinker` makes it"
        environment = {**os.environ, "PYTHONPATH": str(NEWER) if self.version == "0.6.1" else ""}
        environment |= {"TINKER_BASE_URL": self.address, "HF_DATASETS_CACHE": str(self.workplace / "datasets")}
        command, said = [sys.executable, *arguments], dict(capture_output=True, text=True, timeout=BOUND_S, check=False)
        done = subprocess.run(command, cwd=self.workplace, env=environment, **said)
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    def run(self, recipe: str, log: pathlib.Path, *arguments: str, own_url: bool = True) -> list[dict]:
        """Run ``python -m tinker_cookbook.recipes.<recipe>``; return the rows of its metrics.jsonl."""
        given = [f"model_name={CHAT}", *arguments, *([f"base_url={self.address}"] if own_url else [])]
        self.python("-m", f"tinker_cookbook.recipes.{recipe}", f"log_path={log}", *given)
        return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", params=["0.5.8", "0.6.1"])
def cookbook(request, workplace, address) -> Cookbook:
    return Cookbook(request.param, workplace, address)


older = pytest.mark.parametrize("cookbook", quick(["0.5.8", "0.6.1"], "0.5.8"), indirect=True)
newer = pytest.mark.parametrize("cookbook", quick(["0.5.8", "0.6.1"], "0.6.1"), indirect=True)


def found(rows: list[dict], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def test_versions(cookbook: Cookbook) -> None:
    said = cookbook.python("-c", "import tinker, tinker_cookbook as c; print(tinker.__version__, c.__file__)").split()
    assert said[0] == "0.38.0" and ("cookbook-0.6.1" in said[1]) == (cookbook.version == "0.6.1")


@older
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


def loss_of(cookbook: Cookbook) -> list[str]:
    return ["loss_fn=importance_sampling"] if cookbook.version == "0.6.1" else []  # its default is stable_reinforce


@pytest.mark.long
def test_rl_loop(cookbook: Cookbook, tmp_path: pathlib.Path) -> None:
    small = ("batch_size=4", "group_size=4", "max_tokens=8", "save_every=1", *SMALL)
    rows = cookbook.run("rl_loop", tmp_path / "log", *small, *loss_of(cookbook))
    assert [row["step"] for row in rows] == [0, 1]
    saved = [json.loads(line)["name"] for line in (tmp_path / "log" / "checkpoints.jsonl").read_text().splitlines()]
    assert saved == ["000001", "final"]


@newer
@pytest.mark.parametrize("env", quick(["arithmetic", "gsm8k"], "gsm8k"))
def test_math_rl_with_its_evaluator(cookbook: Cookbook, tmp_path: pathlib.Path, env: str) -> None:
    given = (f"env={env}", "max_tokens=5", "eval_every=1", *SUMS, *loss_of(cookbook))
    rows = cookbook.run("math_rl.train", tmp_path / "log", *given)
    assert len(rows) >= 2
    assert max(abs(x) for x in found(rows, "optim/kl_sample_train_v2")) < 1e-8  # sampler and trainer are one policy
    if env == "gsm8k":  # the data set of sums has no held-out part
        assert len(found(rows, "test/env/all/reward/total")) >= 2


@pytest.mark.long
def test_direct_preference_optimisation(cookbook: Cookbook, tmp_path: pathlib.Path) -> None:
    given = ("dataset=hhh", "renderer_name=qwen3", "max_length=512", "batch_size=8", "learning_rate=1e-3")
    rows = cookbook.run("preference.dpo.train", tmp_path / "log", *given, "max_steps=3")
    losses = found(rows, "dpo_loss")
    assert losses[0] == pytest.approx(math.log(2.0), abs=1e-6)  # policy and reference are one model
    assert losses[-1] < losses[0] and found(rows, "test/nll")


@pytest.mark.long
def test_on_policy_distillation(cookbook: Cookbook, tmp_path: pathlib.Path) -> None:
    given = (f"teacher_model={CHAT}", "renderer_name=qwen3", "dataset=deepmath", "group_size=2", "groups_per_batch=4")
    rows = cookbook.run("distillation.on_policy_distillation", tmp_path / "log", *given, "max_tokens=8", *SMALL)
    assert found(rows, "teacher_kl")[0] == pytest.approx(0.0, abs=1e-6)  # the teacher is the student's start
    assert max(abs(x) for x in found(rows, "optim/kl_sample_train_v2")) < 1e-8


@pytest.mark.long
def test_several_turns(cookbook: Cookbook, tmp_path: pathlib.Path) -> None:
    given = ("renderer_name=qwen3", "group_size=2", "batch_size=1", "max_tokens=4", "eval_every=0", "save_every=1")
    given += ("max_steps=1",)
    rows = cookbook.run("multiplayer_rl.guess_number.train", tmp_path / "log", *given, own_url=False)
    assert found(rows, "env/all/turns_per_episode")[0] > 1.0

"""`megatron-rl new` writes a run that runs: by its command, and by its job; from a checkout and from a wheel."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.patience import HANG_S, patient
from tests.tools.slurm_stand_ins import submit

ROOT = pathlib.Path(__file__).parents[2]
BOUND_S = patient(4 * HANG_S)
SMALL = (
    "train.num_rollouts=2",
    "train.prompts_per_rollout=4",
    "rollout.max_response_tokens=4",
    "data.max_prompt_tokens=16",
    "metrics.progress=false",
)


def said_by(words: list[str], folder: pathlib.Path, package: pathlib.Path = ROOT) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a model of random weights, and a new run of it in ``runs/mine``."""
    made = tmp_path_factory.mktemp("new")
    said_by([str(ROOT / "examples/quickstart/prepare.py"), "--out", "inputs", "--digits", "1"], made)
    said_by(["-m", "megatron_rl", "new", "runs/mine", "--model", "inputs/model"], made)
    return made


def test_a_new_run_trains_by_its_command(folder: pathlib.Path) -> None:
    said_by(["-m", "megatron_rl", "train", "--nproc", "2", "--config", "runs/mine/run.yaml", *SMALL], folder)
    rows = [json.loads(line) for line in (folder / "runs/mine/run/metrics.jsonl").read_text().splitlines()]
    assert {row["rollout"] for row in rows if "rollout" in row} == {1, 2}
    assert (folder / "runs/mine/run/report.html").is_file()


def test_a_new_run_is_submitted_by_its_job(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    code, (call,), said = submit(
        tmp_path, folder / "runs/mine/job.sbatch", "optimizer.lr=1e-5", SLURM_SUBMIT_DIR=str(folder)
    )
    assert code == 0, said
    assert "bash runs/mine/slurm/node.sh a1:20007 -m megatron_rl.train --run-dir" in call
    assert call.endswith("--config runs/mine/run.yaml optimizer.lr=1e-5")
    text = (folder / "runs/mine/job.sbatch").read_text()
    assert 'RUN_DIR="${RUN_DIR:-runs/mine/run}"' in text and "#SBATCH --job-name=mine\n" in text


def test_a_wheel_holds_every_command(tmp_path: pathlib.Path) -> None:
    build = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "-w", str(tmp_path)]
    copied = tmp_path / "source"
    for name in ("megatron_rl", "tools", "examples"):
        shutil.copytree(ROOT / name, copied / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, copied / name)
    said_by([*build, str(copied)], tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    for name in ("convert", "verify", "simulate"):
        said = said_by(["-m", "megatron_rl", name, "--help"], tmp_path, installed)
        assert said.startswith("usage: "), said
    said_by(["-m", "megatron_rl", "new", "mine"], tmp_path, installed)
    assert (tmp_path / "mine/slurm/node.sh").read_text() == (ROOT / "examples/slurm/node.sh").read_text()

"""`megatron-rl new` writes a run that runs: by its command, and by its job."""

import contextlib
import pathlib
import shutil
import sys

import pytest

from megatron_rl.commands import command
from tests.patience import HANG_S, patient
from tests.runs.command import ROOT, command_line, ended, rows_of, said_by
from tests.tools.slurm_stand_ins import submit

BOUND_S = patient(4 * HANG_S)
SMALL = ("train.num_rollouts=2", "train.prompts_per_rollout=4", "rollout.max_response_tokens=4",
         "data.max_prompt_tokens=16", "metrics.progress=false")


def python(words: list[str], folder: pathlib.Path) -> str:
    return said_by([sys.executable, *words], folder, BOUND_S, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def folder(arithmetic: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a model of random weights, and a new run of it in ``runs/mine``."""
    made = tmp_path_factory.mktemp("new")
    shutil.copytree(arithmetic / "model", made / "inputs" / "model")
    with contextlib.chdir(made):
        assert command.main(["new", "runs/mine", "--model", "inputs/model"]) == 0
    return made


def assert_trained(run_dir: pathlib.Path) -> None:
    assert {row["rollout"] for row in rows_of(run_dir) if "rollout" in row} == {1, 2}
    assert (run_dir / "report.html").is_file()


def in_folder(rank: int, world: int, folder: pathlib.Path, given: list[str]) -> tuple[int, str]:
    with contextlib.chdir(folder):
        return command_line(rank, world, given)


def test_a_new_run_trains(pool, folder: pathlib.Path) -> None:
    ended(pool, 2, folder, ["--config", "runs/mine/run.yaml", *SMALL], run=in_folder)
    assert_trained(folder / "runs/mine/run")


@pytest.mark.long(seconds=30)
def test_a_new_run_trains_by_its_command(folder: pathlib.Path) -> None:
    train = ["-m", "megatron_rl", "train", "--nproc", "2", "--config", "runs/mine/run.yaml", *SMALL]
    python([*train, "run.dir=commanded"], folder)
    assert_trained(folder / "commanded")


def test_a_new_run_is_submitted_by_its_job(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    job = folder / "runs/mine/job.sbatch"
    code, (call,), said = submit(tmp_path, job, "optimizer.lr=1e-5", SLURM_SUBMIT_DIR=str(folder))
    assert code == 0, said
    assert "bash runs/mine/slurm/node.sh a1:20007 -m megatron_rl.train --run-dir" in call
    assert call.endswith("--config runs/mine/run.yaml optimizer.lr=1e-5")
    text = job.read_text()
    assert 'RUN_DIR="${RUN_DIR:-runs/mine/run}"' in text and "#SBATCH --job-name=mine\n" in text

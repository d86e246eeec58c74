"""Checks that ``--dry-run`` says of the run's folder what the start itself says, and writes nothing there."""

from __future__ import annotations

import os
import pathlib

import pytest

from megatron_rl import cli, train
from megatron_rl.distributed.run_lock import RunLock
from tests.reference import tiny_config
from tests.runs.command import arguments, command_line

SAVED = ("checkpoint.save_every_rollouts=1", "train.num_rollouts=1", "optimizer.schedule=constant")


def contents(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Return each path below a folder with its size and its last change, the folder's own included."""
    paths = [folder, *folder.rglob("*")]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


def said_by_dry_run(given: list[str], capsys) -> tuple[int, str]:
    """Return the exit code of a dry run on one GPU, and what megatron_rl says last."""
    code = train.main([*given, "--dry-run", "--gpus-per-node=1"])
    return code, refusal(capsys.readouterr().err)


def refusal(said: str) -> str:
    return said.rpartition("megatron_rl: ")[2].strip()


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.long(seconds=40)
def test_a_finished_folder_is_refused_as_the_start_refuses_it(pool, arithmetic, tmp_path, capsys) -> None:
    run_dir = tmp_path / "run"
    ((code, said),) = pool.run(1, command_line, arguments(arithmetic, run_dir, *SAVED), timeout_s=120)
    assert code == 0, said
    for changes in (["optimizer.lr=0.5"], ["run.seed=5"]):
        given = arguments(arithmetic, run_dir, *SAVED, *changes)
        ((code, said),) = pool.run(1, command_line, given, timeout_s=120)
        assert code == cli.EXIT_CONFIG, said
        before = contents(run_dir)
        assert said_by_dry_run(given, capsys) == (cli.EXIT_CONFIG, refusal(said))
        assert contents(run_dir) == before
    for unchanged in (["metrics.progress=false"], ["train.num_rollouts=2"], ["checkpoint.resume=never"]):
        given = arguments(arithmetic, run_dir, *SAVED, *unchanged)
        assert said_by_dry_run(given, capsys)[0] == 0
    # a model of another shape, and a damaged checkpoint
    other = tmp_path / "model"
    other.mkdir()
    for path in (arithmetic / "model").iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    tiny_config("qwen3").save_pretrained(other)
    given = arguments(arithmetic, run_dir, *SAVED, f"model.hf_path={other}", "model.init=random")
    code, said = said_by_dry_run(given, capsys)
    assert code == cli.EXIT_CONFIG and "is of another model" in said, said
    for state in run_dir.glob("checkpoints/iter_*/state.json"):
        state.write_text(state.read_text()[:-9])
    given = arguments(arithmetic, run_dir, *SAVED)
    code, said = said_by_dry_run(given, capsys)
    assert code == cli.EXIT_CONFIG and "checkpoints in" in said and "are damaged" in said, said


def test_a_folder_that_is_locked_or_cannot_be_made_is_refused_and_none_is_made(
    arithmetic, tmp_path, capsys, monkeypatch
) -> None:
    new = tmp_path / "new" / "run"
    assert said_by_dry_run(arguments(arithmetic, new), capsys)[0] == 0
    assert not new.parent.exists()
    (tmp_path / "file").write_text("")
    for path, words in [
        (tmp_path / "file", "is a file, not a folder"),
        (tmp_path / "file" / "below", "Not a directory"),
        (tmp_path / ("a" * 300), "File name too long"),
    ]:
        code, said = said_by_dry_run(arguments(arithmetic, path), capsys)
        assert code == cli.EXIT_CONFIG and words in said, said
    lock = RunLock(tmp_path)
    lock.acquire()
    before = contents(tmp_path)
    code, said = said_by_dry_run(arguments(arithmetic, tmp_path), capsys)
    assert code == cli.EXIT_CONFIG and f"is in use by another run (process {os.getpid()} on" in said, said
    assert contents(tmp_path).keys() == before.keys()
    lock.release()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root, as whom tests may run, is refused nothing
    for path, words in [(tmp_path, "cannot be written: no permission"), (new, "cannot be made: Permission denied")]:
        code, said = said_by_dry_run(arguments(arithmetic, path), capsys)
        assert code == cli.EXIT_CONFIG and words in said, said

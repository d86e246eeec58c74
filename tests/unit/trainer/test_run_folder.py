"""Checks trainer/run_folder.py: folders that cannot be a run's, records cut short, and runs that have ended."""

import json
import os
import pathlib
import types

import pytest

from megatron_rl.config import Config, config_to_dict
from megatron_rl.errors import ConfigError, RunError
from megatron_rl.observability.metrics import MetricsWriter
from megatron_rl.trainer import run_folder
from megatron_rl.trainer.run_folder import check_run_folder, refuse_finished, repair_records, report_run

ROW = json.dumps({"step": 1, "step_kind": "real", "phase": "rl", "train/loss": 0.5}) + "\n"


def test_a_folder_that_cannot_be_made_is_named_with_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path, words in [
        (tmp_path / "file", "is a file, not a folder"),
        (tmp_path / "file" / "below", "Not a directory"),
        (pathlib.Path("/proc/a_run"), "cannot be made"),
        (tmp_path / ("a" * 300), "File name too long"),
        (pathlib.Path("a\0b"), "null byte"),
    ]:
        with pytest.raises(ConfigError, match=f"{words}.*--run-dir"):
            check_run_folder(path)
    for _ in range(2):
        check_run_folder(tmp_path / "new" / "run")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root, as whom tests may run, is refused nothing
    with pytest.raises(ConfigError, match="cannot be written: no permission"):
        check_run_folder(tmp_path)


@pytest.mark.parametrize(("text", "left"),
                         [("", ""), ("a\n", "a\n"), ("a\nb", "a\n"), ("abc", ""), ("a\n" + "b" * 200_000, "a\n")])
def test_only_an_unfinished_last_line_is_removed(tmp_path, text, left):
    path = tmp_path / "lines"
    path.write_text(text)
    assert run_folder.drop_unfinished_line(path) == len(text) - len(left) and path.read_text() == left


def test_a_cut_line_is_repaired_and_a_bad_one_named_before_training(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text(ROW + ROW[:20])
    (tmp_path / "trace.jsonl").write_text('{"a": 1}\n{"b"')
    repair_records(tmp_path)
    assert path.read_text() == ROW and (tmp_path / "trace.jsonl").read_text() == '{"a": 1}\n'
    assert caplog.text.count("an interrupted write has left") == 2
    path.write_text(ROW + "spoilt\n" + ROW.replace("1", "2"))
    with pytest.raises(ConfigError, match=r"metrics.jsonl:2: .*; correct or delete the line, or move the file away"):
        repair_records(tmp_path)


def test_a_report_that_cannot_be_written_is_said_and_fails_nothing(tmp_path, caplog):
    report_run(tmp_path, "")  # there are no metrics
    assert run_folder.written_rows(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text(ROW)
    (tmp_path / "report.html").mkdir()
    report_run(tmp_path, "")
    assert caplog.text.count("report.html was not written") == 2 and "last table is left out" in caplog.text
    (tmp_path / "report.html").rmdir()
    report_run(tmp_path, "")
    assert (tmp_path / "report.html").stat().st_size


def test_a_row_that_a_full_disk_refuses_ends_the_run_by_the_files_name(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    state = {"ghost_steps": 0, "last_step": None}
    row = {"step": 1, "step_kind": "real", "phase": "rl"}
    with (
        pytest.raises(RunError, match=r"metrics.jsonl cannot be written: No space left on device; make room there"),
        MetricsWriter(tmp_path, Config().metrics, 1, True, state) as writer,
    ):
        writer.write(row)


def settings(**changes: object) -> dict:
    values = json.loads(json.dumps(config_to_dict(Config())))
    for name, value in changes.items():
        section, _, key = name.partition("__")
        values[section][key] = value
    return values


def test_a_run_that_has_ended_refuses_other_settings_that_would_train_nothing(tmp_path, caplog):
    config = Config()
    prompts = types.SimpleNamespace(load_state=lambda state: None)
    resumed = (tmp_path, config.train, config_to_dict(config), prompts, tmp_path)
    num = config.train.num_rollouts
    state = {"rollouts": num, "feed": {"jobs": {}}, "prompts": {}, "config": settings()}
    caplog.set_level("INFO")
    refuse_finished(*resumed, state)
    assert "nothing is left to do" in caplog.text
    for same in (settings(run__deadline_s=5.0), settings(metrics__progress=False), settings(checkpoint__keep_last=9)):
        refuse_finished(*resumed, state | {"config": same})
    other = state | {"config": settings(run__seed=7, optimizer__lr=0.5)}
    with pytest.raises(ConfigError, match=r"has ended, with .* run.seed=0 \(it was 7\).* raise train.num_rollouts"):
        refuse_finished(*resumed, other)
    for unfinished in ({"rollouts": num - 1}, {"supervised_steps": 3}, {"feed": {"jobs": {"1": []}}}):
        refuse_finished(*resumed, other | unfinished)

"""Exports of an earlier run do not stand beside a new one's."""

from __future__ import annotations

import pathlib

import pytest

from megatron_rl.checkpoint.exports import exported_steps, set_exports_aside, start_anew
from megatron_rl.errors import ConfigError
from megatron_rl.weights.side_files import copy_side_files


def write(root: pathlib.Path, *names: str) -> None:
    for name in names:
        (root / name / "hf").mkdir(parents=True)


def test_exports_of_later_steps_are_set_aside(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "step_8", "step_16", "step_24", "stale_step_24", "iter_0000030", "step_x")
    (tmp_path / "step_24" / "hf" / "new").touch()
    assert exported_steps(tmp_path) == [8, 16, 24]
    set_exports_aside(tmp_path, 8)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["iter_0000030", "stale_step_16", "stale_step_24", "step_8", "step_x"]
    assert (tmp_path / "stale_step_24" / "hf" / "new").exists()


def test_a_new_run_sets_the_whole_folder_aside_but_not_its_own_model(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "checkpoints"
    write(root, "step_8")
    for is_main in (True, False):
        with pytest.raises(ConfigError, match="step_8/hf is an export of an earlier run in .*give it another run.dir"):
            start_anew(root, str(root / "step_8" / "hf"), is_main=is_main)
    start_anew(root, "/models/other", is_main=False)
    assert exported_steps(root) == [8]
    start_anew(root, "/models/other", is_main=True)
    assert exported_steps(root) == [] and exported_steps(tmp_path / "checkpoints.1") == [8]


def test_another_tokenizers_files_take_the_place_of_the_models(tmp_path: pathlib.Path) -> None:
    for folder, names in {
        "model": ["config.json", "generation_config.json", "tokenizer.json", "vocab.json", "chat_template.jinja"],
        "tokenizer": ["config.json", "tokenizer.json", "tokenizer_config.json", "spiece.model", "README.md"],
        "copy": [],
    }.items():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(folder)
    copied = copy_side_files(tmp_path / "model", tmp_path / "copy", tokenizer=tmp_path / "tokenizer")
    found = {path.name: path.read_text() for path in (tmp_path / "copy").iterdir()}
    assert sorted(copied) == sorted(found)
    assert found == {
        "config.json": "model",
        "generation_config.json": "model",
        "tokenizer.json": "tokenizer",
        "tokenizer_config.json": "tokenizer",
        "spiece.model": "tokenizer",
    }

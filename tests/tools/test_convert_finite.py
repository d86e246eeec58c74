"""Checks that tools/convert_checkpoint.py refuses weights that hold NaN or infinity, by the name of their tensor."""

from __future__ import annotations

import pathlib
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.reference import tiny_model

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

import convert_checkpoint


def run(*arguments: object) -> int:
    return convert_checkpoint.main([str(x) for x in arguments])


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (torch.nan, "float32", "holds 2 numbers that are NaN or infinite, of"),
        (-torch.inf, "bfloat16", "holds 2 numbers that are NaN or infinite, of"),
        (1e38, "float16", "hold numbers that torch.float16 has no place for; choose a wider one with --dtype"),
    ],
)
def test_numbers_that_are_not_finite_are_refused_both_ways(tmp_path, capsys, value, dtype, message) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    tiny_model("qwen2_tied")[1].save_pretrained(tmp_path / "hf")
    held = load_file(tmp_path / "hf/model.safetensors")
    held[name][0, :2] = 5.0
    save_file(held, tmp_path / "hf/model.safetensors", {"format": "pt"})
    assert run("import", tmp_path / "hf", tmp_path / "good") == 0
    held[name][0, :2] = value
    save_file(held, tmp_path / "hf/model.safetensors", {"format": "pt"})
    assert run("import", tmp_path / "hf", tmp_path / "mcore", "--tp", 2, "--dtype", dtype) == 2
    assert f"{name} {message}" in capsys.readouterr().err and not list((tmp_path / "mcore").glob("*"))
    for file in (tmp_path / "good/release").glob("*.distcp"):
        wrong = torch.tensor([value, value], dtype=torch.float32).numpy().tobytes()
        content, right = file.read_bytes(), torch.tensor([5.0, 5.0]).numpy().tobytes()
        assert content.count(right) == 1
        file.write_bytes(content.replace(right, wrong))
    assert run("export", tmp_path / "good", tmp_path / "back", "--dtype", dtype) == 2
    said = capsys.readouterr().err
    assert f"{name} of {tmp_path}/good/release {message}" in said and not (tmp_path / "back").exists()

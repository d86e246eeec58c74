"""Checks that tools/convert_checkpoint.py writes a router's bias in float32, and leaves further layers behind."""

from __future__ import annotations

import json
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file

from tests.reference import tiny_model

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

import convert_checkpoint


def run(*arguments: object) -> int:
    return convert_checkpoint.main([str(x) for x in arguments])


def test_a_routers_bias_is_written_in_float32_and_further_layers_stay_behind(tmp_path: pathlib.Path) -> None:
    """``--dtype`` is that of parameters; layers that predict further tokens are named and left out."""
    _, model = tiny_model("glm4_moe", layers=4)
    model.save_pretrained(tmp_path / "hf")
    weights = tmp_path / "hf" / "model.safetensors"
    wanted = load_file(weights)
    extra = {f"model.layers.4.{name}.weight": torch.zeros(4) for name in ("eh_proj", "shared_head.norm")}
    save_file(wanted | extra, weights, metadata={"format": "pt"})
    assert run("roundtrip", tmp_path / "hf", "--dtype", "bfloat16") == 0
    assert run("import", tmp_path / "hf", tmp_path / "megatron", "--dtype", "bfloat16", "--ep", 2) == 0
    assert run("export", tmp_path / "megatron", tmp_path / "back") == 0
    kept = {k: v if k.endswith("correction_bias") else v.bfloat16() for k, v in wanted.items()}
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert set(found) == set(kept) and {x.dtype for x in kept.values()} == {torch.float32, torch.bfloat16}
    assert all(found[k].dtype == v.dtype and torch.equal(found[k], v) for k, v in kept.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"

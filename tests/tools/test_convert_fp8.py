"""convert_checkpoint.py writes the full weights that a folder of block FP8 stands for."""

from __future__ import annotations

import json
import pathlib
import sys

import torch
from safetensors.torch import load_file

from megatron_rl.weights.reader import HuggingFaceReader
from tests.equality.odd_folders import both, config, fp8, in_fp8, tensors
from tests.reference import tiny_model

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

import convert_checkpoint


def test_block_fp8_becomes_the_full_weights_that_it_stands_for(tmp_path: pathlib.Path) -> None:
    """Import and export write full weights, and a config.json that says nothing of FP8."""
    source, megatron, back = tmp_path / "hf", tmp_path / "megatron", tmp_path / "back"
    tiny_model("llama")[1].save_pretrained(source)
    both(tensors(in_fp8), config(**fp8()))(source)
    assert convert_checkpoint.main(["import", str(source), str(megatron), "--tp", "2"]) == 0
    assert convert_checkpoint.main(["export", str(megatron), str(back)]) == 0
    reader, found = HuggingFaceReader(source), load_file(back / "model.safetensors")
    assert reader.files.keys() == found.keys()
    for name, tensor in found.items():
        assert tensor.dtype is torch.float32
        assert torch.equal(tensor, reader.read(name, 0, 0, len(tensor)))
    for folder in (megatron / "hf", back):
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())

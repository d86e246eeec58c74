"""convert_checkpoint.py unpacks gpt-oss's MXFP4, and writes transformers' own bfloat16 layout."""

from __future__ import annotations

import json
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_rl.weights.reader import HuggingFaceReader
from tests.reference import tiny_model

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

import convert_checkpoint


def in_mxfp4(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """Put random MXFP4 in the place of a folder's experts; return what transformers makes of its tensors."""
    held = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    wanted = {name: x.bfloat16() for name, x in held.items()}
    for name in [x for x in held if x.endswith("experts.gate_up_proj") or x.endswith("experts.down_proj")]:
        experts, columns, rows = held.pop(name).shape
        size = (experts, rows, columns // 32)
        held[f"{name}_blocks"] = torch.randint(256, (*size, 16), dtype=torch.uint8, generator=random)
        held[f"{name}_scales"] = torch.randint(118, 128, size, dtype=torch.uint8, generator=random)
        wanted[name] = convert_moe_packed_tensors(held[f"{name}_blocks"], held[f"{name}_scales"])
    held = {name: x if x.dtype is torch.uint8 else x.bfloat16() for name, x in held.items()}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return wanted


def test_mxfp4_becomes_the_bfloat16_layout_of_transformers(tmp_path: pathlib.Path) -> None:
    """Import and export write each stack as one tensor, in shards too, and a config.json that says nothing of MXFP4."""
    source, megatron, back = tmp_path / "hf", tmp_path / "megatron", tmp_path / "back"
    tiny_model("gpt_oss", layers=4)[1].save_pretrained(source)
    wanted = in_mxfp4(source)
    assert convert_checkpoint.main(["import", str(source), str(megatron), "--ep", "2"]) == 0
    assert convert_checkpoint.main(["export", str(megatron), str(back), "--max-shard-gb", "0.0001"]) == 0
    files = [load_file(file) for file in back.glob("*.safetensors")]
    found = {name: x for file in files for name, x in file.items()}
    assert len(files) > 4 and found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype is torch.bfloat16 and torch.equal(tensor, wanted[name]), name
    for folder in (megatron / "hf", back):
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    sliced, again = HuggingFaceReader(source), HuggingFaceReader(back)
    assert sliced.files.keys() == again.files.keys()

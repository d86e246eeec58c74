"""The numbers of `megatron-rl convert`: those that are not finite, block FP8, MXFP4, a router's float32 bias."""

import json
import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_rl.weights.reader import HuggingFaceReader
from tests.equality.odd_folders import both, config, fp8, in_fp8, tensors
from tests.reference import tiny_model
from tests.tools.converting import run, same, tensors_of


@pytest.mark.parametrize(("value", "dtype", "message"), [
    (torch.nan, "float32", "holds 2 numbers that are NaN or infinite, of"),
    (-torch.inf, "bfloat16", "holds 2 numbers that are NaN or infinite, of"),
    (1e38, "float16", "hold numbers that torch.float16 has no place for; choose a wider one with --dtype"),
])
def test_numbers_that_are_not_finite_are_refused_both_ways(tmp_path, capsys, value, dtype, message) -> None:
    name, source = "model.layers.1.mlp.down_proj.weight", tmp_path / "hf"
    tiny_model("qwen2_tied")[1].save_pretrained(source)
    tensors(lambda held: held[name][0, :2].fill_(5.0))(source)
    assert run("import", source, tmp_path / "good") == 0
    tensors(lambda held: held[name][0, :2].fill_(value))(source)
    assert run("import", source, tmp_path / "mcore", "--tp", 2, "--dtype", dtype) == 2
    assert f"{name} {message}" in capsys.readouterr().err and not list((tmp_path / "mcore").glob("*"))
    right, wrong = (torch.tensor([x, x], dtype=torch.float32).numpy().tobytes() for x in (5.0, value))
    for file in (tmp_path / "good/release").glob("*.distcp"):
        content = file.read_bytes()
        assert content.count(right) == 1
        file.write_bytes(content.replace(right, wrong))
    assert run("export", tmp_path / "good", tmp_path / "back", "--dtype", dtype) == 2
    said = capsys.readouterr().err
    assert f"{name} of {tmp_path}/good/release {message}" in said and not (tmp_path / "back").exists()


def there_and_back(folder: pathlib.Path, cut: str, *export: object) -> dict[str, torch.Tensor]:
    """Import and export folder/hf; return the tensors, beside a config.json that says nothing of a quantisation."""
    assert run("import", folder / "hf", folder / "megatron", cut, 2) == 0
    assert run("export", folder / "megatron", folder / "back", *export) == 0
    for written in (folder / "megatron" / "hf", folder / "back"):
        assert "quantization_config" not in json.loads((written / "config.json").read_text())
    return tensors_of(folder / "back")


def test_block_fp8_becomes_the_full_weights_that_it_stands_for(tmp_path: pathlib.Path) -> None:
    tiny_model("llama")[1].save_pretrained(tmp_path / "hf")
    both(tensors(in_fp8), config(**fp8()))(tmp_path / "hf")
    found, reader = there_and_back(tmp_path, "--tp"), HuggingFaceReader(tmp_path / "hf")
    assert reader.files.keys() == found.keys() and {x.dtype for x in found.values()} == {torch.float32}
    assert all(torch.equal(x, reader.read(name, 0, 0, len(x))) for name, x in found.items())


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
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config(quantization_config=mxfp4, dtype="bfloat16")(folder)
    return wanted


def test_mxfp4_becomes_the_bfloat16_layout_of_transformers(tmp_path: pathlib.Path) -> None:
    """Each stack is one tensor, in shards too."""
    tiny_model("gpt_oss", layers=4)[1].save_pretrained(tmp_path / "hf")
    wanted = in_mxfp4(tmp_path / "hf")
    assert same(there_and_back(tmp_path, "--ep", "--max-shard-gb", 0.0001), wanted)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 4
    sliced, again = HuggingFaceReader(tmp_path / "hf"), HuggingFaceReader(tmp_path / "back")
    assert sliced.files.keys() == again.files.keys()


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
    assert {x.dtype for x in kept.values()} == {torch.float32, torch.bfloat16}
    assert same(tensors_of(tmp_path / "back"), kept)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"

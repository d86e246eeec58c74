"""MXFP4 is read as transformers reads it, and experts' slices lie where their stack has them."""

import json
import pathlib

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_rl.errors import ConfigError
from megatron_rl.weights.families.register import stacking
from megatron_rl.weights.mxfp4 import unpack
from megatron_rl.weights.reader import HuggingFaceReader
from megatron_rl.weights.shards import Planned
from megatron_rl.weights.stacked import copies, joined_plan, slice_of, slices, slices_of

EXPERTS, ROWS, GROUPS = 3, 8, 2


def packed(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    size = (EXPERTS, ROWS, GROUPS)
    blocks = torch.randint(256, (*size, 16), dtype=torch.uint8, generator=random)
    return blocks, torch.randint(100, 140, size, dtype=torch.uint8, generator=random)


def test_every_byte_under_every_scale_is_what_transformers_makes_of_it() -> None:
    """All 256 bytes under all scales but 255, which stands for no number, are transformers' to the bit, signs too."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8)[None, :, None].expand(1, 255, 16)
    wanted = convert_moe_packed_tensors(blocks.contiguous(), scales.contiguous())
    found = unpack(blocks, scales).mT
    assert found.dtype is torch.bfloat16 and found.shape == wanted.shape == (1, 512, 255)
    assert torch.equal(found.contiguous().view(torch.int16), wanted.contiguous().view(torch.int16))


def folder(path: pathlib.Path, tensors: dict[str, torch.Tensor], **fields: object) -> HuggingFaceReader:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "gpt_oss"} | fields))
    save_file(tensors, path / "model.safetensors")
    return HuggingFaceReader(path)


QUANTIZED = {"quantization_config": {"quant_method": "mxfp4"}}
STACK = "model.layers.0.mlp.experts.down_proj"


def slice_name(stack: str, expert: int) -> str:
    ((name, _),) = slices_of(stack, expert, stacking("gpt_oss"))
    return name


def test_slices_of_full_and_packed_stacks_equal_those_of_the_whole(tmp_path: pathlib.Path) -> None:
    blocks, scales = packed()
    whole = convert_moe_packed_tensors(blocks, scales).contiguous()
    full = folder(tmp_path / "full", {STACK: whole, f"{STACK}_bias": whole[:, 0].contiguous()})
    small = folder(tmp_path / "packed", {f"{STACK}_blocks": blocks, f"{STACK}_scales": scales}, **QUANTIZED)
    names = [slice_name(STACK, expert) for expert in range(EXPERTS)]
    assert set(small.files) == set(names) and len(full.files) == 2 * EXPERTS
    for reader in (full, small):
        for expert, name in enumerate(names):
            assert reader.size(name) == (32 * GROUPS, ROWS) and reader.dtype(name) is torch.bfloat16
            assert torch.equal(reader.read(name, 0, 5, 41), whole[expert, 5:41])
            assert torch.equal(reader.read(name, 1, 3, 7), whole[expert, :, 3:7])
    assert torch.equal(full.read(slice_name(f"{STACK}_bias", 2), 0, 1, 4), whole[2, 0, 1:4])


def test_scales_of_another_shape_are_refused(tmp_path: pathlib.Path) -> None:
    blocks, scales = packed()
    held = {f"{STACK}_blocks": blocks, f"{STACK}_scales": scales[:, 1:].contiguous()}
    with pytest.raises(ConfigError, match=r"down_proj_scales .* is U8 of shape \(3, 7, 2\); .* U8 of \(3, 8, 2\)"):
        folder(tmp_path / "packed", held, **QUANTIZED)


def test_stacks_come_apart_and_together() -> None:
    random = torch.Generator().manual_seed(1)
    stack, other = torch.randn(EXPERTS, 4, 5, generator=random), torch.randn(7, generator=random)
    apart = dict(slices({STACK: stack, "model.norm.weight": other}.items(), "gpt_oss"))
    places = [slice_of(name, stacking("gpt_oss")) for name in apart]
    assert [place and place[:2] for place in places] == [*((STACK, e) for e in range(EXPERTS)), None]
    order = sorted(apart.items(), reverse=True)  # as expert ranks may bring them
    together = copies(iter(order), "gpt_oss", EXPERTS)
    assert set(together) == {STACK, "model.norm.weight"} and torch.equal(together[STACK], stack)
    planned = [Planned(name=name, shape=tuple(x.shape), dtype=x.dtype) for name, x in apart.items()]
    (joined, alone) = joined_plan(planned, "gpt_oss")
    assert (joined.name, joined.shape, joined.slices) == (STACK, (EXPERTS, 4, 5), tuple(apart)[:EXPERTS])
    assert (alone, joined_plan(planned, "qwen3")) == (planned[-1], planned)

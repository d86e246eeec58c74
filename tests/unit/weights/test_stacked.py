"""Stacks of transposed experts: gate, up and down of each are read, written and put together as they lie there."""

import json
import pathlib

import torch
from safetensors.torch import load_file, save_file

from megatron_rl.weights.reader import HuggingFaceReader
from megatron_rl.weights.shards import Planned, ShardWriter
from megatron_rl.weights.stacked import copies, joined_plan, slices

EXPERTS, HIDDEN, FFN = 3, 4, 5
WITHIN = "model.layers.1.feed_forward.experts"


def stacks() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        f"{WITHIN}.gate_up_proj": torch.randn(EXPERTS, HIDDEN, 2 * FFN, generator=random),
        f"{WITHIN}.down_proj": torch.randn(EXPERTS, FFN, HIDDEN, generator=random),
        "model.norm.weight": torch.randn(HIDDEN, generator=random),
    }


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors under the names of a mixture with three per expert, cut by hand."""
    found = {"model.norm.weight": tensors["model.norm.weight"]}
    for expert in range(EXPERTS):
        both, down = (tensors[f"{WITHIN}.{name}"][expert] for name in ("gate_up_proj", "down_proj"))
        found[f"{WITHIN}.{expert}.gate_proj.weight"] = both[:, :FFN].t()
        found[f"{WITHIN}.{expert}.up_proj.weight"] = both[:, FFN:].t()
        found[f"{WITHIN}.{expert}.down_proj.weight"] = down.t()
    return found


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_views_and_copies_are_each_others_inverse() -> None:
    whole = stacks()
    found = dict(slices(whole.items(), "llama4_text"))
    assert equal(found, apart(whole))
    assert equal(copies(reversed(found.items()), "llama4_text", EXPERTS), whole)
    found[f"{WITHIN}.2.up_proj.weight"].zero_()  # a view: an engine fills its parameters through it
    assert whole[f"{WITHIN}.gate_up_proj"][2, :, FFN:].abs().sum() == 0


def test_a_file_is_read_in_slices_and_written_expert_by_expert(tmp_path: pathlib.Path) -> None:
    whole = stacks()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4_text"}))
    save_file(whole, tmp_path / "model.safetensors")
    reader, wanted = HuggingFaceReader(tmp_path), apart(whole)
    assert set(reader.files) == set(wanted)
    for name, tensor in wanted.items():
        assert reader.size(name) == tuple(tensor.shape) and reader.dtype(name) is torch.float32
        assert torch.equal(reader.read(name, 0, 1, 3), tensor[1:3])
        if tensor.dim() == 2:
            assert torch.equal(reader.read(name, 1, 1, 3), tensor[:, 1:3])
    whole = stacks()
    parts = apart(whole)
    order = [name for name in parts if "down_proj" not in name] + [name for name in parts if "down_proj" in name]
    planned = [Planned(name=name, shape=tuple(parts[name].shape), dtype=torch.float32) for name in order]
    writer = ShardWriter(tmp_path, joined_plan(planned, "llama4_text"), 200)
    for name in order:
        writer.add(name, parts[name])
    files = writer.finish()
    assert len(files) > 2
    assert equal({k: v for file in tmp_path.glob("*.safetensors") for k, v in load_file(file).items()}, whole)

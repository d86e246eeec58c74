"""Checks tools/convert_checkpoint.py on one process, and its refusals.

Every family comes back to the bit and computes what transformers computes.
"""

from __future__ import annotations

import json
import pathlib
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoint import convert
from megatron_rl.checkpoint.folder import DamagedCheckpoint
from megatron_rl.checkpoint.torch_dist import TorchDistReader, TorchDistWriter
from megatron_rl.errors import ConfigError
from megatron_rl.weights.fused import file_tensors
from megatron_rl.weights.shards import Planned, ShardWriter
from tests.patience import patient
from tests.reference import FAMILIES, MIXTURES, tiny_config, tiny_model

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import convert_checkpoint  # noqa: E402

# float32, 4 layers, 64 tokens: seen up to 2e-6; a lost bias or a wrong rotary frequency shows at 1e-2 and above
LOGPROB_TOLERANCE = 1e-5


def write_model(
    folder: pathlib.Path, family: str = "qwen2_tied", *, dtype: torch.dtype = torch.float32, shards: str = "100KB"
):
    """Write a Hugging Face directory with side files that are no weights; return its model."""
    _, model = tiny_model(family, layers=4)
    model.to(dtype).save_pretrained(folder, max_shard_size=shards)
    (folder / "tokenizer.json").write_text('{"of": "nothing"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_own.py").write_text("raise SystemExit")
    return model


def tensors_of(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return set(found) == set(wanted) and all(
        found[k].dtype == v.dtype and torch.equal(found[k], v) for k, v in wanted.items()
    )


def run(*arguments: object) -> int:
    return convert_checkpoint.main([str(x) for x in arguments])


@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_a_round_trip_is_bitwise_and_log_probs_are_those_of_transformers(tmp_path: pathlib.Path, family: str) -> None:
    """Every family comes back to the bit, and its log-probs are those of transformers.

    The Megatron side's weights come out of the checkpoint by Megatron-Core's own load; llama3_rope runs past its
    original length.
    """
    model = write_model(tmp_path / "hf", family)
    experts = ("--ep", 2) if family in MIXTURES else ()
    arguments = (
        "roundtrip",
        tmp_path / "hf",
        "--tp",
        2,
        "--pp",
        2,
        *experts,
        "--check-logits",
        "--tolerance",
        LOGPROB_TOLERANCE,
    )
    assert run(*arguments, "--json", tmp_path / "found.json") == 0
    found = json.loads((tmp_path / "found.json").read_text())
    print(family, f"{found['logprob_gap']:.1e}")
    tensors = file_tensors(tensors_of(tmp_path / "hf"), model.config.model_type)  # an expert's in a stack one by one
    assert found["equal"] == found["tensors"] == len(tensors) and found["equal_files"] == found["files"] >= 4


def test_bfloat16_comes_back_and_a_wrong_bit_is_named(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    write_model(tmp_path / "hf", "qwen3", dtype=torch.bfloat16)
    assert run("roundtrip", tmp_path / "hf", "--check-logits") == 0
    read = convert.read_stored

    def flipped(stored, shape, reader):
        for name, tensor in read(stored, shape, reader):
            if name == "model.layers.2.self_attn.k_proj.weight":
                tensor = tensor.clone()
                tensor.view(torch.int16)[3, 5] ^= 1
            yield name, tensor

    monkeypatch.setattr(convert, "read_stored", flipped)
    assert run("roundtrip", tmp_path / "hf") == 1
    printed = capsys.readouterr().out
    assert "different: model.layers.2.self_attn.k_proj.weight" in printed and "NOT equal" in printed


def test_a_wrong_rotary_frequency_shows_in_the_log_probs(tmp_path: pathlib.Path, monkeypatch) -> None:
    write_model(tmp_path / "hf", "llama3_rope")
    from megatron_rl.model import hf_config

    right = hf_config.inverse_frequencies
    monkeypatch.setattr(hf_config, "inverse_frequencies", lambda *given, **named: right(*given, **named) * 1.001)
    assert run("roundtrip", tmp_path / "hf", "--check-logits") == 1


def test_import_and_export_by_the_command_line(tmp_path: pathlib.Path, capsys) -> None:
    """A folder holds several iterations; each is exported in its own dtype or another, as one file or in shards."""
    write_model(tmp_path / "hf", "llama")
    wanted, megatron = tensors_of(tmp_path / "hf"), tmp_path / "megatron"
    assert run("import", tmp_path / "hf", megatron, "--iteration", 7) == 0
    assert run("import", tmp_path / "hf", megatron, "--tp", 2) == 0
    assert (megatron / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert sorted(x.name for x in megatron.iterdir()) == [
        "hf",
        "iter_0000007",
        "latest_checkpointed_iteration.txt",
        "release",
    ]
    assert sorted(x.name for x in (megatron / "release").glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    assert not (megatron / "hf" / "modeling_own.py").exists()
    assert run("export", megatron, tmp_path / "one") == 0
    assert same(tensors_of(tmp_path / "one"), wanted) and (tmp_path / "one" / "model.safetensors").exists()
    assert (tmp_path / "one" / "tokenizer.json").exists() and (tmp_path / "one" / "chat_template.jinja").exists()
    half = ("--iteration", 7, "--dtype", "bfloat16", "--max-shard-gb", 0.0001)
    assert run("export", megatron, tmp_path / "half", *half) == 0
    assert same(tensors_of(tmp_path / "half"), {k: v.bfloat16() for k, v in wanted.items()})
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    index = json.loads((tmp_path / "half" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(wanted) and len(set(index["weight_map"].values())) > 2
    printed = capsys.readouterr().out
    assert f"wrote {megatron / 'release'}" in printed and f"wrote {tmp_path / 'half'}" in printed
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(loaded[k], v.bfloat16()) for k, v in wanted.items())


def test_what_is_there_stays_unless_it_may_be_replaced(tmp_path: pathlib.Path, capsys, monkeypatch) -> None:
    write_model(tmp_path / "hf")
    assert run("import", tmp_path / "hf", tmp_path / "megatron") == 0
    assert run("import", tmp_path / "hf", tmp_path / "megatron") == 2
    assert "release exists; name another folder, or pass --overwrite" in capsys.readouterr().err
    before = (tmp_path / "megatron" / "release" / ".metadata").read_bytes()

    def full(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(TorchDistWriter, "finish", full)
        with pytest.raises(OSError, match="no space"):
            run("import", tmp_path / "hf", tmp_path / "megatron", "--overwrite")
    assert (tmp_path / "megatron" / "release" / ".metadata").read_bytes() == before
    assert not list(tmp_path.rglob("*.partial"))
    assert run("import", tmp_path / "hf", tmp_path / "megatron", "--overwrite") == 0


GROWTH = """
import pathlib, resource, sys, torch
sys.path.insert(0, "tools")
import convert_checkpoint
from safetensors.torch import save_file
from tests.reference import tiny_config

work = pathlib.Path(sys.argv[1])

def write(name, hidden, layers, ffn):
    config = tiny_config("llama", layers=layers, hidden=hidden)
    config.intermediate_size = ffn
    config.save_pretrained(work / name)
    shapes = {f"self_attn.{x}_proj": (hidden if x in "qo" else hidden // 2, hidden) for x in "qkvo"}
    shapes |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)}
    shapes |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    names = {"model.embed_tokens.weight": (99, hidden), "lm_head.weight": (99, hidden), "model.norm.weight": (hidden,)}
    files, sizes = {}, 0
    for i in range(-1, layers):
        here = {f"model.layers.{i}.{k}.weight": v for k, v in shapes.items()} if i >= 0 else names
        tensors = {k: torch.ones(v) for k, v in here.items()}
        save_file(tensors, work / name / f"{i}.safetensors")
        files |= dict.fromkeys(tensors, f"{i}.safetensors")
        sizes += sum(x.nbytes for x in tensors.values())
    import json
    (work / name / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return sizes

def convert(name):
    assert convert_checkpoint.main(["import", str(work / name), str(work / (name + "-megatron"))]) == 0
    assert convert_checkpoint.main(["export", str(work / (name + "-megatron")), str(work / (name + "-back"))]) == 0

convert_checkpoint.give_back_freed_memory()
write("small", 64, 2, 96)
big = write("big", 1024, 20, 1536)
convert("small")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert("big")
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("GROWTH", big, (after - before) * 1024)
"""


@pytest.mark.long
def test_memory_grows_by_a_layer_and_a_tensor_not_by_the_model(tmp_path: pathlib.Path) -> None:
    """Both ways, memory grows by a layer and a tensor, and not by the model.

    The model has 630 MB of weights, 31 MB a layer. The peak may grow by a layer of mapped files, the largest Megatron
    tensor (gate and up, 13 MB), half of it as a chunk on its way to disk, and 8 MB of slack. Seen: 45 MB, whatever the
    number of layers.
    """
    command = [sys.executable, "-c", GROWTH, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(600), check=False)
    assert done.returncode == 0, done.stderr
    size, growth = map(int, done.stdout.split("GROWTH")[1].split())
    layer = 4 * (3 * 1024 * 1024 + 3 * 1024 * 1536)
    print(f"model {size / 1e6:.0f} MB, layer {layer / 1e6:.0f} MB, growth {growth / 1e6:.0f} MB")
    half = 4 * 1024 * 1536
    assert size > 590e6 and growth < layer + 3 * half + 8e6


def changed(folder: pathlib.Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


REFUSED = [
    ({"model_type": "gemma2"}, "missing for gemma2: soft-capped attention scores"),
    ({"model_type": "mamba"}, "missing for mamba: a file of its own in weights/families"),
    ({"attention_bias": True}, "a llama model with attention_bias"),
    (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
        "rope_type='dynamic' is not supported",
    ),
    ({"hidden_size": 128}, "has shape"),
    ({"num_hidden_layers": 3}, "config.json says num_hidden_layers=3 and the files hold 4 layers, 0 to 3"),
    ({"num_hidden_layers": 5}, "holds no tensor named model.layers.4."),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_cannot_be_converted_is_named(tmp_path: pathlib.Path, capsys, values: dict, message: str) -> None:
    write_model(tmp_path / "hf", "llama")
    changed(tmp_path / "hf", **values)
    assert run("import", tmp_path / "hf", tmp_path / "megatron") == 2
    assert message in capsys.readouterr().err and not (tmp_path / "megatron" / "release").exists()
    assert run("inspect", tmp_path / "hf") == 2
    assert "convertible: no: " in capsys.readouterr().out


def test_a_sliding_window_is_the_model_s(tmp_path: pathlib.Path, capsys) -> None:
    """The logits of a windowed model are checked within its window; one of no tokens is refused."""
    write_model(tmp_path / "hf", "mistral")
    changed(tmp_path / "hf", sliding_window=0)
    assert run("roundtrip", tmp_path / "hf") == 2
    assert "sliding_window=0 of mistral" in capsys.readouterr().err
    changed(tmp_path / "hf", sliding_window=16)
    assert run("roundtrip", tmp_path / "hf", "--check-logits") == 0


@pytest.mark.parametrize(("option", "value"), [("--tp", 3), ("--pp", 3), ("--ep", 2)])
def test_a_cut_that_does_not_divide_is_refused(tmp_path: pathlib.Path, capsys, option: str, value: int) -> None:
    write_model(tmp_path / "hf", "llama")
    assert run("import", tmp_path / "hf", tmp_path / "megatron", option, value) == 2
    assert f"{option} {value} does not divide" in capsys.readouterr().err


def rewrite(folder: pathlib.Path, change) -> None:
    tensors = tensors_of(folder)
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        file.unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_dtypes_that_one_tensor_cannot_hold_are_refused_and_cast_when_asked(tmp_path: pathlib.Path, capsys) -> None:
    write_model(tmp_path / "hf", "llama")
    rewrite(
        tmp_path / "hf",
        lambda t: t.update(
            {"model.layers.1.self_attn.k_proj.weight": t["model.layers.1.self_attn.k_proj.weight"].half()}
        ),
    )
    assert run("import", tmp_path / "hf", tmp_path / "megatron") == 2
    assert "are of 2 dtypes and become one tensor; choose one with --dtype" in capsys.readouterr().err
    name = "model.layers.1.mlp.down_proj.weight"
    write_model(tmp_path / "hf2", "llama")
    rewrite(tmp_path / "hf2", lambda t: t.update({name: t[name].bfloat16()}))
    assert run("roundtrip", tmp_path / "hf2") == 2
    assert "torch.float32 in one layer and torch.bfloat16 in another" in capsys.readouterr().err
    assert run("roundtrip", tmp_path / "hf2", "--dtype", "float32") == 0


def test_a_tied_models_own_head_must_be_its_embedding(tmp_path: pathlib.Path, capsys) -> None:
    write_model(tmp_path / "hf")
    rewrite(tmp_path / "hf", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert run("roundtrip", tmp_path / "hf") == 0
    rewrite(tmp_path / "hf", lambda t: t["lm_head.weight"].add_(1.0))
    assert run("import", tmp_path / "hf", tmp_path / "megatron") == 2
    assert "its lm_head.weight is not its model.embed_tokens.weight" in capsys.readouterr().err


def test_inspect_says_what_is_there(tmp_path: pathlib.Path, capsys) -> None:
    model = write_model(tmp_path / "hf", "mixtral")
    parameters = sum(x.numel() for x in model.parameters())
    assert run("inspect", tmp_path / "hf", "--json", tmp_path / "a.json") == 0
    assert run("import", tmp_path / "hf", tmp_path / "megatron") == 0
    assert run("inspect", tmp_path / "megatron", "--tensors", "--json", tmp_path / "b.json") == 0
    hugging_face, megatron = (json.loads((tmp_path / x).read_text()) for x in ("a.json", "b.json"))
    assert hugging_face["parameters"] == megatron["parameters"] == parameters
    assert hugging_face["family"] == megatron["family"] == "mixtral" and megatron["kind"] == "Megatron torch_dist"
    assert (
        "decoder.layers.mlp.experts.experts.linear_fc1.weight [4, 4, 192, 64] torch.float32" in capsys.readouterr().out
    )
    (tmp_path / "megatron" / "hf" / "config.json").unlink()
    assert run("inspect", tmp_path / "megatron") == 2
    assert run("export", tmp_path / "megatron", tmp_path / "out") == 2
    assert (
        "has no hf/config.json; name a directory with the model's config and tokenizer by --hf"
        in capsys.readouterr().err
    )
    assert run("export", tmp_path / "megatron", tmp_path / "out", "--hf", tmp_path / "hf") == 0
    assert run("export", tmp_path, tmp_path / "other", "--hf", tmp_path / "hf") == 2
    assert "it is no Megatron-LM checkpoint" in capsys.readouterr().err
    tiny_config("llama", layers=4).save_pretrained(tmp_path / "other")
    assert run("export", tmp_path / "megatron", tmp_path / "out2", "--hf", tmp_path / "other") == 2
    assert "the config is another model's" in capsys.readouterr().err


def test_parts_that_the_configs_model_has_not_are_refused_on_the_way_out(tmp_path: pathlib.Path, capsys) -> None:
    write_model(tmp_path / "hf", "qwen2_untied")
    assert run("import", tmp_path / "hf", tmp_path / "megatron") == 0
    changed(tmp_path / "megatron" / "hf", tie_word_embeddings=True)
    assert run("export", tmp_path / "megatron", tmp_path / "out", "--dtype", "bfloat16") == 2
    assert (
        "holds 1 tensors of which the config's model has no part, output_layer.weight the first"
        in capsys.readouterr().err
    )
    changed(tmp_path / "megatron" / "hf", tie_word_embeddings=False, vocab_size=100)
    assert run("export", tmp_path / "megatron", tmp_path / "out", "--dtype", "bfloat16") == 2
    assert "has shape (99, 64) and the config asks for (100, 64)" in capsys.readouterr().err


class Payload:
    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path("was_unpickled"),)


def test_nothing_but_metadata_is_unpickled(tmp_path: pathlib.Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer = TorchDistWriter(tmp_path)
    writer.add_chunk(0, ["a"], (2,), (0,), torch.ones(2))
    writer.finish({"iteration": 1})
    assert torch.equal(TorchDistReader(tmp_path).read("a"), torch.ones(2)) and TorchDistReader(tmp_path).common() == {
        "iteration": 1
    }
    torch.save({"iteration": Payload()}, tmp_path / "common.pt")
    with pytest.raises(pickle.UnpicklingError):
        TorchDistReader(tmp_path).common()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(DamagedCheckpoint):
        TorchDistReader(tmp_path)
    assert not (tmp_path / "was_unpickled").exists()


def test_chunks_that_leave_a_hole_are_refused(tmp_path: pathlib.Path) -> None:
    writer = TorchDistWriter(tmp_path)
    writer.add_chunk(0, ["a"], (4, 3), (0, 0), torch.ones(2, 3))
    writer.finish({})
    with pytest.raises(ConfigError, match=r"the chunks of a\[\] in .* hold 6 of 12 elements"):
        TorchDistReader(tmp_path).read("a")


def test_shards_hold_what_safetensors_reads(tmp_path: pathlib.Path) -> None:
    """Safetensors reads from the shards the tensors that were written.

    They have every dtype that is written, and one is larger than a shard; another dtype is refused.
    """
    tensors = {
        f"t{i}": torch.randn(3, i + 1).to(kind)
        for i, kind in enumerate((torch.float32, torch.bfloat16, torch.float16) * 2)
    }
    planned = [Planned(name=k, shape=tuple(v.shape), dtype=v.dtype) for k, v in tensors.items()]
    writer = ShardWriter(tmp_path, planned, shard_bytes=40)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    assert len(writer.finish()) > 3
    assert same(tensors_of(tmp_path), tensors)
    with pytest.raises(ConfigError, match="t is torch.int64; only"):
        ShardWriter(tmp_path, [Planned(name="t", shape=(1,), dtype=torch.int64)], 10)

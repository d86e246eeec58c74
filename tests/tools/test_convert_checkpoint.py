"""Families come back from `megatron-rl convert` to the bit and compute what transformers computes; a bridge."""

from __future__ import annotations

import importlib.machinery
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.checkpoint import convert
from megatron_rl.checkpoint.folder import DamagedCheckpoint
from megatron_rl.checkpoint.torch_dist import TorchDistReader, TorchDistWriter
from megatron_rl.commands.convert.command import parse
from megatron_rl.errors import ConfigError
from megatron_rl.model import hf_config
from megatron_rl.storage.location import location
from megatron_rl.weights.fused import file_tensors
from megatron_rl.weights.shards import Planned, ShardWriter
from tests.equality.odd_folders import DOWN, tensors
from tests.pairwise import quick
from tests.patience import patient
from tests.reference import FAMILIES, MIXTURES, tiny_config, tiny_model
from tests.tools import ROOT
from tests.tools.converting import changed, run, same, tensors_of, write_model

# float32, 4 layers, 64 tokens: seen up to 2e-6; a lost bias or a wrong rotary frequency shows at 1e-2 and above
LOGPROB_TOLERANCE = 1e-5
KEY = "model.layers.1.self_attn.k_proj.weight"
LONG = ("qwen2_untied", "phi3_partial", "qwen3_moe_unnormalised", "moonlight", "llama4_interleaved")  # kin of others
QUICK = [family for family in (*FAMILIES, *MIXTURES) if family not in LONG]


def test_an_import_writes_to_a_folder_and_refuses_a_url(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        parse(["import", str(tmp_path), "s3://bucket/model"])
    assert "s3://bucket/model is a URL, and import writes to a disk" in capsys.readouterr().err


@pytest.mark.parametrize("family", quick([*FAMILIES, *MIXTURES], *QUICK))
def test_a_round_trip_is_bitwise_and_log_probs_are_those_of_transformers(tmp_path: pathlib.Path, family: str) -> None:
    """Megatron-Core's own load reads the Megatron side's weights; llama3_rope runs past its original length."""
    model, found = write_model(tmp_path / "hf", family, shards="100KB"), tmp_path / "found.json"
    cut = ("--tp", 2, "--pp", 2, *(("--ep", 2) if family in MIXTURES else ()))
    check = ("--check-logits", "--tolerance", LOGPROB_TOLERANCE, "--json", found)
    assert run("roundtrip", tmp_path / "hf", *cut, *check) == 0
    found = json.loads(found.read_text())
    held = file_tensors(tensors_of(tmp_path / "hf"), model.config.model_type)  # an expert's in a stack one by one
    assert found["equal"] == found["tensors"] == len(held) and found["equal_files"] == found["files"] >= 4


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
    right = hf_config.inverse_frequencies
    monkeypatch.setattr(hf_config, "inverse_frequencies", lambda *given, **named: right(*given, **named) * 1.001)
    assert run("roundtrip", tmp_path / "hf", "--check-logits") == 1


def test_import_and_export_by_the_command_line(tmp_path: pathlib.Path, capsys) -> None:
    """A folder holds several iterations; each is exported in its own dtype or another, as one file or in shards."""
    write_model(tmp_path / "hf", "llama", shards="100KB")
    wanted, megatron = tensors_of(tmp_path / "hf"), tmp_path / "megatron"
    assert run("import", tmp_path / "hf", megatron, "--iteration", 7) == 0
    assert run("import", tmp_path / "hf", megatron, "--tp", 2) == 0
    assert (megatron / "latest_checkpointed_iteration.txt").read_text() == "release"
    folders = {"hf", "iter_0000007", "release"}
    assert {x.name for x in megatron.iterdir()} == folders | {"latest_checkpointed_iteration.txt"}
    assert sorted(x.name for x in (megatron / "release").glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    assert not (megatron / "hf" / "modeling_own.py").exists() and run("export", megatron, tmp_path / "one") == 0
    assert same(tensors_of(tmp_path / "one"), wanted) and (tmp_path / "one" / "model.safetensors").exists()
    assert (tmp_path / "one" / "tokenizer.json").exists() and (tmp_path / "one" / "chat_template.jinja").exists()
    half = ("--iteration", 7, "--dtype", "bfloat16", "--max-shard-gb", 0.0001)
    assert run("export", megatron, tmp_path / "half", *half) == 0
    assert same(tensors_of(tmp_path / "half"), {k: v.bfloat16() for k, v in wanted.items()})
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    index = json.loads((tmp_path / "half" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(wanted) and len(set(index["weight_map"].values())) > 2
    url = f"memory:/{tmp_path}/half"
    assert run("export", megatron, url, *half) == 0 and run("export", megatron, url) == 2
    stored = location(url).files()
    assert stored.keys() == {str(x.relative_to(tmp_path / "half")) for x in (tmp_path / "half").rglob("*.*")}
    for name in stored:
        assert (location(url) / name).read_bytes() == (tmp_path / "half" / name).read_bytes(), name
    printed = capsys.readouterr().out
    assert f"wrote {megatron / 'release'}" in printed and f"wrote {tmp_path / 'half'}" in printed
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(loaded[k], v.bfloat16()) for k, v in wanted.items())


def test_a_source_in_a_store_gives_what_the_same_folder_on_a_disk_gives(tmp_path, capsys, monkeypatch) -> None:
    """Models by URL are copied to the host's cache, a checkpoint's tensors are read by ranges."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    write_model(tmp_path / "hf", "qwen3_moe", shards="100KB")
    assert run("import", tmp_path / "hf", tmp_path / "megatron", "--ep", 2) == 0
    url = f"memory:/{tmp_path}"
    for path in [*(tmp_path / "hf").rglob("*"), *(tmp_path / "megatron").rglob("*")]:
        if path.is_file():
            (location(url) / str(path.relative_to(tmp_path))).write_bytes(path.read_bytes())
    assert run("import", f"{url}/hf", tmp_path / "again", "--ep", 2) == 0
    assert run("export", f"{url}/megatron", tmp_path / "back") == 0
    assert run("export", f"{url}/megatron/release", tmp_path / "named", "--hf", f"{url}/hf") == 0
    for folder in ("back", "named"):
        assert same(tensors_of(tmp_path / folder), tensors_of(tmp_path / "hf"))
    assert same_bytes(tmp_path / "again" / "release", tmp_path / "megatron" / "release")
    for name in ("hf", "megatron"):
        found = [tmp_path / "disk.json", tmp_path / "store.json"]
        for place, file in zip((tmp_path, url), found, strict=True):
            assert run("inspect", f"{place}/{name}", "--json", file) == 0
        disk, store = (json.loads(x.read_text()) for x in found)
        assert disk | {"checkpoint": ""} == store | {"checkpoint": ""}
    assert run("roundtrip", f"{url}/hf") == 0
    assert run("export", f"{url}/nothing", tmp_path / "none") == 2
    said = capsys.readouterr().err
    assert f"{url}/nothing has no latest_checkpointed_iteration.txt" in said and "Traceback" not in said, said
    with pytest.raises(SystemExit):
        parse(["import", "--gguf", f"{url}/model.gguf", str(tmp_path)])
    assert "--gguf reads a file of a disk, and memory://" in capsys.readouterr().err


def same_bytes(one: pathlib.Path, two: pathlib.Path) -> bool:
    return {x.name: x.read_bytes() for x in one.iterdir()} == {x.name: x.read_bytes() for x in two.iterdir()}


def test_what_is_there_stays_unless_it_may_be_replaced(tmp_path: pathlib.Path, capsys, monkeypatch) -> None:
    write_model(tmp_path / "hf")
    assert run("import", tmp_path / "hf", tmp_path / "megatron") == 0
    assert run("import", tmp_path / "hf", tmp_path / "megatron") == 2
    assert "release exists; name another folder, or pass --overwrite" in capsys.readouterr().err
    before = (tmp_path / "megatron" / "release" / ".metadata").read_bytes()
    full = Mock(side_effect=OSError("no space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr(TorchDistWriter, "finish", full)
        assert run("import", tmp_path / "hf", tmp_path / "megatron", "--overwrite") == 2
    assert "no space left on device; mend that path" in capsys.readouterr().err
    assert (tmp_path / "megatron" / "release" / ".metadata").read_bytes() == before
    assert not list(tmp_path.rglob("*.partial"))
    assert run("import", tmp_path / "hf", tmp_path / "megatron", "--overwrite") == 0


GROWTH = """
import pathlib, resource, sys
from megatron_rl.commands.convert.command import give_back_freed_memory, main

work = pathlib.Path(sys.argv[1])

def convert(name):
    hf, megatron, back = (str(work / (name + end)) for end in ("", "-megatron", "-back"))
    assert main(["import", hf, megatron]) == main(["export", megatron, back]) == 0

give_back_freed_memory()
convert("small")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert("big")
print("GROWTH", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.long
def test_memory_grows_by_a_layer_and_a_tensor_not_by_the_model(tmp_path: pathlib.Path) -> None:
    """Of 630 MB, 31 a layer, the peak may grow by a mapped layer, the largest tensor (gate and up, 13 MB), half
    of that as a chunk on its way to disk, and 8 MB of slack. Seen: 45 MB, whatever the number of layers.
    """
    tiny_model("llama")[1].save_pretrained(tmp_path / "small")
    _, big = tiny_model("llama", layers=20, hidden=1024)
    big.save_pretrained(tmp_path / "big", max_shard_size="32MB")
    command = [sys.executable, "-c", GROWTH, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(600), check=False)
    assert done.returncode == 0, done.stderr
    growth = int(done.stdout.split("GROWTH")[1])
    layer, half = 4 * (3 * 1024 * 1024 + 3 * 1024 * 1536), 4 * 1024 * 1536
    assert sum(x.nbytes for x in big.state_dict().values()) > 590e6 and growth < layer + 3 * half + 8e6


REFUSED = [({"model_type": "gemma2"}, "missing for gemma2: soft-capped attention scores"),
           ({"model_type": "mamba"}, "missing for mamba: a file of its own in weights/families"),
           ({"attention_bias": True}, "a llama model with attention_bias"),
           ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type='dynamic' is not supported"),
           ({"hidden_size": 128}, "has shape"),
           ({"num_hidden_layers": 3}, "config.json says num_hidden_layers=3 and the files hold 4 layers, 0 to 3"),
           ({"num_hidden_layers": 5}, "holds no tensor named model.layers.4.")]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_cannot_be_converted_is_named(tmp_path: pathlib.Path, capsys, values: dict, message: str) -> None:
    write_model(tmp_path / "hf", "llama")
    changed(tmp_path / "hf", **values)
    assert run("import", tmp_path / "hf", tmp_path / "megatron") == 2
    assert message in capsys.readouterr().err and not (tmp_path / "megatron" / "release").exists()
    assert run("inspect", tmp_path / "hf") == 2 and "convertible: no: " in capsys.readouterr().out


def test_a_sliding_window_is_the_model_s(tmp_path: pathlib.Path, capsys) -> None:
    """The logits of a windowed model are checked within its window; one of no tokens is refused."""
    write_model(tmp_path / "hf", "mistral")
    changed(tmp_path / "hf", sliding_window=0)
    assert run("roundtrip", tmp_path / "hf") == 2 and "sliding_window=0 of mistral" in capsys.readouterr().err
    changed(tmp_path / "hf", sliding_window=16)
    assert run("roundtrip", tmp_path / "hf", "--check-logits") == 0


def test_a_cut_that_does_not_divide_and_dtypes_that_one_tensor_cannot_hold_are_refused(tmp_path, capsys) -> None:
    write_model(tmp_path / "hf", "llama")
    for option, value, fault in (("--tp", 3, "does not divide"), ("--pp", 99, "must be 1 to"), ("--ep", 2, "does not")):
        assert run("import", tmp_path / "hf", tmp_path / "megatron", option, value) == 2
        assert f"{option} {value} {fault}" in capsys.readouterr().err
    write_model(tmp_path / "hf", "llama")
    tensors(lambda held: held.update({KEY: held[KEY].half()}))(tmp_path / "hf")
    assert run("import", tmp_path / "hf", tmp_path / "megatron") == 2
    assert "are of 2 dtypes and become one tensor; choose one with --dtype" in capsys.readouterr().err
    write_model(tmp_path / "hf2", "llama")
    tensors(lambda held: held.update({DOWN: held[DOWN].bfloat16()}))(tmp_path / "hf2")
    assert run("roundtrip", tmp_path / "hf2") == 2
    assert "torch.float32 in one layer and torch.bfloat16 in another" in capsys.readouterr().err
    assert run("roundtrip", tmp_path / "hf2", "--dtype", "float32") == 0


def test_a_tied_models_own_head_must_be_its_embedding(tmp_path: pathlib.Path, capsys) -> None:
    write_model(tmp_path / "hf")
    tensors(lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"].clone()}))(tmp_path / "hf")
    assert run("roundtrip", tmp_path / "hf") == 0
    tensors(lambda held: held["lm_head.weight"].add_(1.0))(tmp_path / "hf")
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
    assert "mlp.experts.experts.linear_fc1.weight [4, 4, 192, 64] torch.float32" in capsys.readouterr().out
    (tmp_path / "megatron" / "hf" / "config.json").unlink()
    assert run("inspect", tmp_path / "megatron") == 2 and run("export", tmp_path / "megatron", tmp_path / "out") == 2
    assert "has no hf/config.json; name a directory" in capsys.readouterr().err
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
    assert "the config's model has no part, output_layer.weight the first" in capsys.readouterr().err
    changed(tmp_path / "megatron" / "hf", tie_word_embeddings=False, vocab_size=100)
    assert run("export", tmp_path / "megatron", tmp_path / "out", "--dtype", "bfloat16") == 2
    assert "has shape (99, 64) and the config asks for (100, 64)" in capsys.readouterr().err


def cut(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def pipe(path: pathlib.Path) -> None:
    path.unlink()
    os.mkfifo(path)


def zeros(path: pathlib.Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def text(content: str) -> Callable[[pathlib.Path], object]:
    return lambda path: path.write_text(content)


LATEST = "latest_checkpointed_iteration.txt"
DAMAGED = [
    ("release/__0_0.distcp", cut, "bytes, and .metadata has 'decoder.final_layernorm._extra_state/shard_0_1' at"),
    ("release/__0_0.distcp", pathlib.Path.unlink, "__0_0.distcp cannot be read (No such file or directory)"),
    ("release/__0_0.distcp", pipe, "__0_0.distcp is no regular file"),
    ("release/.metadata", pipe, ".metadata is no regular file"),
    ("release/metadata.json", text("{"), "metadata.json: not valid JSON"),
    ("release/metadata.json", text("{}"), "metadata.json lacks the field sharded_backend"),
    ("release/common.pt", cut, "common.pt is no file of torch's, or was cut short"),
    ("release/common.pt", zeros, "common.pt is no file of torch's, or was cut short"),
    (LATEST, text("\xb2"), "says '\\\\xc2\\\\xb2', neither a number nor 'release'"),
    (LATEST, text("9" * 5000), "has 5000 bytes; at most 64 are read"),
    (LATEST, pipe, f"{LATEST} is no regular file"),
]


def test_a_damaged_checkpoint_ends_in_one_line_that_names_the_file(tmp_path: pathlib.Path, capsys) -> None:
    """``inspect`` and ``export`` say the same, but of the common state, which no export reads."""
    write_model(tmp_path / "hf")
    assert run("import", tmp_path / "hf", tmp_path / "megatron") == 0
    for number, (name, damage, words) in enumerate(DAMAGED):
        folder = shutil.copytree(tmp_path / "megatron", tmp_path / f"damaged{number}")
        damage(folder / name)
        for asked in (["inspect", folder], ["export", folder, tmp_path / "out"])[: 1 + ("common" not in name)]:
            capsys.readouterr()
            assert run(*asked) == 2, (name, words)
            (said,) = capsys.readouterr().err.splitlines()
            assert words in said and "--iteration" in said, said
    zeros(tmp_path / "megatron" / "release" / "__0_0.distcp")
    assert run("export", tmp_path / "megatron", tmp_path / "out") == 2 and not (tmp_path / "out").exists()
    assert "weight in" in (said := capsys.readouterr().err) and "__0_0.distcp is no file of torch's" in said
    pipe(tmp_path / "hf" / "model.safetensors")
    assert run("inspect", tmp_path / "hf") == 2 and "it is no regular file" in capsys.readouterr().err


class Payload:
    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path("was_unpickled"),)


def test_nothing_but_metadata_is_unpickled_and_a_hole_between_chunks_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer = TorchDistWriter(tmp_path)
    writer.add_chunk(0, ["a"], (2,), (0,), torch.ones(2))
    writer.add_chunk(0, ["b"], (4, 3), (0, 0), torch.ones(2, 3))
    writer.finish({"iteration": 1})
    reader = TorchDistReader(tmp_path)
    with pytest.raises(ConfigError, match=r"the chunks of b\[\] in .* hold 6 of 12 elements"):
        reader.read("b")
    assert torch.equal(reader.read("a"), torch.ones(2)) and reader.common() == {"iteration": 1}
    torch.save({"iteration": Payload()}, tmp_path / "common.pt")
    with pytest.raises(pickle.UnpicklingError):
        TorchDistReader(tmp_path).common()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(DamagedCheckpoint):
        TorchDistReader(tmp_path)
    assert not (tmp_path / "was_unpickled").exists()


def test_shards_hold_what_safetensors_reads(tmp_path: pathlib.Path) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float16) * 2
    wanted = {f"t{i}": torch.randn(3, i + 1).to(kind) for i, kind in enumerate(kinds)}
    planned = [Planned(name=k, shape=tuple(v.shape), dtype=v.dtype) for k, v in wanted.items()]
    writer = ShardWriter(tmp_path, planned, shard_bytes=40)
    for name, tensor in wanted.items():
        writer.add(name, tensor)
    assert len(writer.finish()) > 3 and same(tensors_of(tmp_path), wanted)
    with pytest.raises(ConfigError, match="t is torch.int64; only"):
        ShardWriter(tmp_path, [Planned(name="t", shape=(1,), dtype=torch.int64)], 10)


class StandIn:
    """Stands in for ``megatron.bridge.AutoBridge`` 0.3.1, and notes the calls that it gets."""

    calls: list[tuple] = []

    @classmethod
    def can_handle(cls, path: str) -> bool:
        return json.loads((pathlib.Path(path) / "config.json").read_text())["model_type"] == "gemma2"

    @classmethod
    def import_ckpt(cls, hf_model_id: str, megatron_path: str, **kwargs) -> None:
        cls.calls.append(("import", hf_model_id, megatron_path, kwargs))

    @classmethod
    def from_hf_pretrained(cls, path: str) -> StandIn:
        cls.calls.append(("from", path))
        return cls()

    def export_ckpt(self, megatron_path: str, hf_path: str, show_progress: bool = True) -> None:
        self.calls.append(("export", megatron_path, hf_path, show_progress))


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    module = types.ModuleType("megatron.bridge")
    module.AutoBridge, module.__spec__ = StandIn, importlib.machinery.ModuleSpec("megatron.bridge", None)
    monkeypatch.setitem(sys.modules, "megatron.bridge", module)
    StandIn.calls = []
    return StandIn


def folder_of(path: pathlib.Path, family: str) -> pathlib.Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": family}))
    return path


def test_import_and_export_call_the_bridge(bridge, tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    hf, out = folder_of(tmp_path / "hf", "gemma2"), tmp_path / "out"
    assert run("import", hf, out, "--dtype", "bfloat16") == 0
    assert run("export", out, tmp_path / "back", "--hf", hf, "--quiet") == 0
    assert bridge.calls == [("import", str(hf), str(out), {"torch_dtype": torch.bfloat16}),
                            ("from", str(hf)),
                            ("export", str(out), str(tmp_path / "back"), False)]
    assert capsys.readouterr().out.count("by megatron-bridge") == 2


@pytest.mark.parametrize(("family", "gpu", "extra", "said"), [
    ("gemma2", False, (), "there is no GPU"),
    ("gemma2", True, ("--tp", "2"), "leave them out"),
    ("mamba2", True, (), "neither our tables nor the megatron-bridge"),
])
def test_what_the_bridge_cannot_do_is_said(bridge, tmp_path, monkeypatch, capsys, family, gpu, extra, said) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert run("import", folder_of(tmp_path / "hf", family), tmp_path / "out", *extra) == 2
    assert said in capsys.readouterr().err and not bridge.calls


def test_without_the_bridge_the_error_says_what_is_missing_and_how_to_get_it(tmp_path: pathlib.Path, capsys) -> None:
    assert run("import", folder_of(tmp_path / "hf", "gemma2"), tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "soft-capped attention scores" in said and "megatron_rl[bridge]" in said

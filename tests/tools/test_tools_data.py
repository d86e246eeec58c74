"""What make_tokenizer.py, make_model.py and the examples' scripts write loads, round-trips, and has right answers."""

import json
import operator
import pathlib
import re

import make_model
import make_tokenizer
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.config import DataConfig
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.data.rows import load_rows
from megatron_rl.errors import ConfigError
from megatron_rl.reward.math import math_verify
from tests.tools import load_script, words

gsm8k = load_script("examples/gsm8k/prepare.py")
quickstart = load_script("examples/quickstart/prepare.py")

SOLVED = {"Natalia sold 48, then half. How many?": "48/2 = <<48/2=24>>24\n48+24 = <<48+24=72>>72 clips\n#### 72",
          "A house costs $80,000. Janet’s profit?": "It is $<<80000*1.5=120000>>120,000\n#### 120,000",
          "It was 4 degrees and fell by 7.  Now?": "4-7 = -3\n#### -3"}
GSM8K_ROWS = [{"question": question, "answer": answer} for question, answer in SOLVED.items()]
SMALL = {"hidden": 64, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32, "max_position": 32}
problems = load_script("examples/smollm2/problems.py")
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
math = load_script("examples/h100/prepare_math.py")
BOXES = {r"so $x=\boxed{\frac{1}{2}}$.": r"\boxed{\frac{1}{2}}",
         r"first \boxed{1}, then \boxed{ (3,\infty) }": r"\boxed{(3,\infty)}",
         r"$\boxed 7$": r"\boxed{7}",
         r"\fbox{\$32,\!348}": r"\boxed{\$32,\!348}",
         r"\boxed{\left\{1,2\right\}}": r"\boxed{\left\{1,2\right\}}",
         r"\boxed{\text{even}}": r"\boxed{\text{even}}",
         "no box": None,
         r"\boxed{1": None}


def write_jsonl(path: pathlib.Path, rows) -> pathlib.Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def token_ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def test_bpe_round_trips_and_cuts_digits_apart(tmp_path, capsys):
    path = write_jsonl(tmp_path / "d.jsonl", GSM8K_ROWS)
    given = f"--input {path} --columns question answer --vocab-size 300 --out {tmp_path / 't'}"
    assert make_tokenizer.main(words(f"{given} --json {tmp_path / 'r.json'}")) == 0
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(capsys.readouterr().out)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "t")
    assert (tokenizer.eos_token, tokenizer.pad_token, len(tokenizer)) == ("<|endoftext|>", "<|pad|>", 300)
    assert [tokenizer.decode([i]) for i in token_ids(tokenizer, "80120")] == list("80120")
    for text in ("never seen: ß \n\t ½ 漢 .", " x , y !", "<|endoftext|>"):
        assert tokenizer.decode(token_ids(tokenizer, text)) == text


def test_character_tokenizer_has_just_those_characters_and_what_cannot_be_tokens_is_refused(tmp_path):
    assert make_tokenizer.main(["--characters", "0123456789+-= ", "--out", str(tmp_path)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 2 + 14
    ids = token_ids(tokenizer, "12 + 3=")
    assert len(ids) == 7 and tokenizer.decode(ids) == "12 + 3="
    for characters, message in (("", "is empty"), ("12é", "'é', which is more than one byte")):
        with pytest.raises(ConfigError, match=message):
            make_tokenizer.make_characters(characters)
    with pytest.raises(ConfigError, match="--vocab-size 257 must be at least 258"):
        make_tokenizer.train_bpe(["x"], 257)


def test_what_cannot_round_trip_fails_the_tool(tmp_path, capsys):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "1+x"}])
    arguments = ["--input", str(path), "--out", str(tmp_path / "t"), "--columns"]
    assert make_tokenizer.main([*arguments, "prompt", "--characters", "0123+"]) == 1
    assert "'1+x' came back as '1+'" in capsys.readouterr().err and make_tokenizer.main([*arguments, "answer"]) == 1
    assert "--columns answer: row 0" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_5_text"])
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
    assert a == b and a != c and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("sizes", "message"), [
    ({"hidden": 100}, "--hidden 100 / --heads 4 = 25 is the size of a head and must be one of 32, 64, 80"),
    ({"heads": 3, "hidden": 128}, "= 42.6667"),
    ({"heads": 4, "kv_heads": 3}, "--heads 4 must be a multiple of --kv-heads 3"),
    ({"layers": 0}, "--layers 0 must be at least 1"),
])
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        make_model.ModelSizes(**sizes)


def test_gsm8k_columns(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name, count in (("train", 3), ("test", 1)):
        write_jsonl(data / f"{name}.jsonl", GSM8K_ROWS[:count])
    sizes = "--vocab-size 300 --hidden 64 --layers 1 --heads 2 --kv-heads 1 --intermediate 32"
    assert gsm8k.main(words(f"--gsm8k {data} --out {tmp_path / 'out'} {sizes}")) == 0
    rows = load_rows(tmp_path / "out" / "train.jsonl")
    assert [row["answer"] for row in rows] == ["72", "120000", "-3"]
    assert [row["prompt"] for row in rows] == [row["question"] for row in GSM8K_ROWS]
    assert rows[0]["solution"] == "48/2 = 24\n48+24 = 72 clips\n#### 72"
    assert rows[1]["solution"] == "It is $120,000\n#### 120,000"
    assert len(load_rows(tmp_path / "out" / "test.jsonl")) == 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    source = PromptDataset(rows, tokenizer, DataConfig(shuffle=False), seed=0, context_tokens=1024)
    alone = tmp_path / "alone"
    assert gsm8k.main(["--gsm8k", str(data), "--out", str(alone), "--data-only"]) == 0
    assert sorted(path.name for path in alone.iterdir()) == ["test.jsonl", "train.jsonl"]
    assert list(load_rows(alone / "train.jsonl")) == list(rows)
    for row, found in zip(rows, source.next_solutions(3), strict=True):
        texts = tokenizer.decode(found.prompt.token_ids), tokenizer.decode(found.response_ids[:-1])
        assert texts == (row["prompt"], row["solution"]) and found.response_ids[-1] == tokenizer.eos_token_id


def test_gsm8k_row_without_a_number_is_named(tmp_path, capsys):
    write_jsonl(tmp_path / "train.jsonl", [*GSM8K_ROWS, {"question": "q", "answer": "no mark"}])
    assert gsm8k.main(["--gsm8k", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "row 3 of" in (message := capsys.readouterr().err) and "'no mark'" in message
    assert gsm8k.main(["--gsm8k", str(tmp_path), "--out", str(tmp_path / "out"), "--heads", "3"]) == 1
    assert "--hidden 256 / --heads 3" in capsys.readouterr().err


def test_quickstart_writes_every_problem_once_in_the_seeds_order(tmp_path):
    assert quickstart.main(["--out", str(tmp_path), "--test-rows", "20"]) == 0
    train, test = load_rows(tmp_path / "train.jsonl"), load_rows(tmp_path / "test.jsonl")
    assert (len(train), len(test), len({row["prompt"] for row in [*train, *test]})) == (180, 20, 200)
    for row in [*train, *test]:
        assert row["answer"] == row["solution"] == str(eval(row["prompt"].rstrip("=")))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(0.8e6, rel=0.05)
    assert quickstart.generate(1, ["+"], 5) == quickstart.generate(1, ["+"], 5) != quickstart.generate(1, ["+"], 6)
    with pytest.raises(ConfigError, match="--operations '/' must be"):
        quickstart.generate(1, ["/"], 0)


def row(solution: str) -> str:
    return json.dumps({"problem": f"Why {solution}?", "level": "Level 5", "type": "Algebra", "solution": solution})


@pytest.mark.parametrize("solution", BOXES)
def test_the_last_box_is_the_answer(solution: str) -> None:
    answer = BOXES[solution]
    assert math.boxed_answer(solution) == answer and (answer is None or math.can_be_earned(answer))


def test_lines_and_a_file_for_each_problem_give_the_same_columns(tmp_path, capsys) -> None:
    lines, files, rows = tmp_path / "lines", tmp_path / "files", [row(solution) for solution in [*BOXES, r"\boxed{?}"]]
    lines.mkdir()
    for split in ("train", "test"):
        (lines / f"{split}.jsonl").write_text("\n".join(rows))
        (files / split / "algebra").mkdir(parents=True)
        for number, each in enumerate(rows):
            (files / split / "algebra" / f"{number}.json").write_text(each)
    for source in (lines, files):
        assert math.main(["--math", str(source), "--out", str(tmp_path / f"of {source.name}")]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["train_rows"] == 6 and report["test_without_box"] == 2 and report["train_not_verified"] == 1
    found = read(tmp_path / "of lines" / "train.jsonl")
    assert found == read(tmp_path / "of files" / "train.jsonl")
    assert {each["solution"]: each["answer"] for each in found} == {k: v for k, v in BOXES.items() if v is not None}
    assert [each["solution"] for each in found] != [solution for solution in BOXES if BOXES[solution]]  # mixed
    right = [f"The answer is {each['answer']}." for each in found]
    assert math_verify([""] * 6, right, [[]] * 6, [each["answer"] for each in found]) == [1.0] * 6


def test_what_cannot_be_read_is_named(tmp_path, capsys) -> None:
    assert math.main(["--math", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "holds neither train.jsonl nor JSON files" in capsys.readouterr().err
    (tmp_path / "train.jsonl").write_text('{"question": "1?", "solution": "1"}\n')
    assert math.main(["--math", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "train.jsonl:1 has no text column 'problem'" in capsys.readouterr().err


def question(row: dict) -> str:
    return row["prompt"][-1]["content"]


def test_answers_are_those_of_the_working_and_rows_repeat(tmp_path: pathlib.Path) -> None:
    """Every sentence of a solution is true, its last value is the answer, and math_verify takes the solution."""
    arguments = ["--train-rows", "600", "--test-rows", "100", "--seed", "3"]
    for folder in ("a", "b"):
        assert problems.main([*arguments, "--out", str(tmp_path / folder)]) == 0
    for name, count in (("train.jsonl", 600), ("test.jsonl", 100)):
        rows = read(tmp_path / "a" / name)
        assert rows == read(tmp_path / "b" / name) and len(rows) == count == len({question(row) for row in rows})
        assert {row["kind"] for row in rows} == problems.KINDS.keys()
        for row in rows:
            sentences = re.findall(r"(\d+) ([-+*]) (\d+) = (-?\d+)\.", row["solution"])
            assert len(sentences) == problems.KINDS[row["kind"]].steps
            for left, sign, right, value in sentences:
                assert SIGNS[sign](int(left), int(right)) == int(value)
            assert row["answer"] == sentences[-1][-1] and int(row["answer"]) > 0
            assert set(re.findall(r"\d+", question(row))) <= {x for s in sentences for x in s}
        answers = [row["answer"] for row in rows[:40]]
        assert math_verify([], [row["solution"] for row in rows[:40]], [], answers) == [1.0] * 40


def test_no_problem_is_trained_and_held_out_and_steps_are_those_asked_for_or_refused(tmp_path, capsys) -> None:
    assert problems.main(["--out", str(tmp_path), "--test-rows", "200"]) == 0
    rows = [read(tmp_path / name) for name in ("train.jsonl", "test.jsonl")]
    train, test = ({(row["kind"], *re.findall(r"\d+", question(row))) for row in part} for part in rows)
    assert train and len(test) == 200 and not train & test
    assert problems.main(words(f"--out {tmp_path}/two --train-rows 90 --test-rows 90 --steps 2")) == 0
    assert {problems.KINDS[row["kind"]].steps for row in read(tmp_path / "two" / "test.jsonl")} == {2}
    for given, said in (
        (("--steps", "1", "--test-rows", "1000"), r"error: \d+ problems to hold out and 0 to train on were found"),
        (("--steps", "3"), "--steps 3 must name 1, 2 or both"),
        (("--steps", "two"), "--steps two"),
    ):
        assert problems.main(["--out", str(tmp_path), *given]) == 1 and re.search(said, capsys.readouterr().err)

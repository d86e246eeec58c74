"""The word problems of examples/smollm2: right answers, the same rows again, and nothing held out that is trained."""

from __future__ import annotations

import json
import pathlib
import re
import sys

from megatron_rl.reward.math import math_verify

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "smollm2"))

import problems


def read(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
                assert {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[
                    sign
                ] == int(value)
            assert row["answer"] == sentences[-1][-1] and int(row["answer"]) > 0
            assert set(re.findall(r"\d+", question(row))) <= {x for s in sentences for x in s}
        answers = [row["answer"] for row in rows[:40]]
        assert math_verify([], [row["solution"] for row in rows[:40]], [], answers) == [1.0] * 40


def test_no_kind_and_numbers_are_both_trained_and_held_out(tmp_path: pathlib.Path) -> None:
    assert problems.main(["--out", str(tmp_path), "--test-rows", "200"]) == 0
    train, test = (
        {(row["kind"], *re.findall(r"\d+", question(row))) for row in read(tmp_path / name)}
        for name in ("train.jsonl", "test.jsonl")
    )
    assert train and len(test) == 200 and not train & test


def test_two_steps_alone_are_made_where_they_are_asked_for(tmp_path: pathlib.Path) -> None:
    assert problems.main(["--out", str(tmp_path), "--steps", "2"]) == 0
    assert {problems.KINDS[row["kind"]].steps for row in read(tmp_path / "test.jsonl")} == {2}


def test_more_problems_than_there_are_and_other_steps_are_refused(tmp_path: pathlib.Path, capsys) -> None:
    assert problems.main(["--out", str(tmp_path), "--test-rows", "9000"]) == 1
    assert re.search(r"error: \d+ problems to hold out and 0 to train on were found", capsys.readouterr().err)
    assert problems.main(["--out", str(tmp_path), "--steps", "3"]) == 1
    assert "--steps 3 must name 1, 2 or both" in capsys.readouterr().err
    assert problems.main(["--out", str(tmp_path), "--steps", "two"]) == 1
    assert "--steps two" in capsys.readouterr().err

"""The MATH-like data of examples/h100: the last box is the answer, and every kept answer can be earned."""

from __future__ import annotations

import json
import pathlib
import runpy

import pytest

from megatron_rl.reward.math import math_verify

SCRIPT = runpy.run_path(str(pathlib.Path(__file__).parents[2] / "examples" / "h100" / "prepare_math.py"))
BOXES = {
    r"so $x=\boxed{\frac{1}{2}}$.": r"\boxed{\frac{1}{2}}",
    r"first \boxed{1}, then \boxed{ (3,\infty) }": r"\boxed{(3,\infty)}",
    r"$\boxed 7$": r"\boxed{7}",
    r"\fbox{\$32,\!348}": r"\boxed{\$32,\!348}",
    r"\boxed{\left\{1,2\right\}}": r"\boxed{\left\{1,2\right\}}",
    r"\boxed{\text{even}}": r"\boxed{\text{even}}",
    "no box": None,
    r"\boxed{1": None,
}


def row(solution: str) -> str:
    return json.dumps({"problem": f"Why {solution}?", "level": "Level 5", "type": "Algebra", "solution": solution})


def written(out: pathlib.Path, split: str) -> list[dict]:
    return [json.loads(line) for line in (out / f"{split}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("solution", BOXES)
def test_the_last_box_is_the_answer(solution: str) -> None:
    answer = BOXES[solution]
    assert SCRIPT["boxed_answer"](solution) == answer
    assert answer is None or SCRIPT["can_be_earned"](answer)


def test_lines_and_a_file_for_each_problem_give_the_same_columns(tmp_path, capsys) -> None:
    lines, files = tmp_path / "lines", tmp_path / "files"
    lines.mkdir()
    for split in ("train", "test"):
        (lines / f"{split}.jsonl").write_text("".join(row(solution) + "\n" for solution in [*BOXES, r"\boxed{?}"]))
        (files / split / "algebra").mkdir(parents=True)
        for number, solution in enumerate([*BOXES, r"\boxed{?}"]):
            (files / split / "algebra" / f"{number}.json").write_text(row(solution))
    for source in (lines, files):
        assert SCRIPT["main"](["--math", str(source), "--out", str(tmp_path / f"of {source.name}")]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["train_rows"] == 6 and report["test_without_box"] == 2 and report["train_not_verified"] == 1
    found = written(tmp_path / "of lines", "train")
    assert found == written(tmp_path / "of files", "train")
    assert {each["solution"]: each["answer"] for each in found} == {k: v for k, v in BOXES.items() if v is not None}
    assert [each["solution"] for each in found] != [solution for solution in BOXES if BOXES[solution]]  # mixed
    right = [f"The answer is {each['answer']}." for each in found]
    assert math_verify([""] * 6, right, [[]] * 6, [each["answer"] for each in found]) == [1.0] * 6


def test_what_cannot_be_read_is_named(tmp_path, capsys) -> None:
    assert SCRIPT["main"](["--math", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "holds neither train.jsonl nor JSON files" in capsys.readouterr().err
    (tmp_path / "train.jsonl").write_text('{"question": "1?", "solution": "1"}\n')
    assert SCRIPT["main"](["--math", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "train.jsonl:1 has no text column 'problem'" in capsys.readouterr().err

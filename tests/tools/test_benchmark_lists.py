"""Checks the problems and rewards of tools/benchmarks/lists.py."""

import json

import lists as tool
import pytest

from tests.tools import words


def test_rewards_are_the_shares_of_right_beginnings() -> None:
    given = {"7, 8, 9": 1.0, "7, 8, 10": 2 / 3, "Sure! 7 8 9 10 11": 1.0, "8, 9": 0.0, "": 0.0, "7,8": 2 / 3}
    given |= {"07 8 9": 0.0}
    ids = [[0]] * len(given)
    found = tool.listed(["?"] * len(given), list(given), ids, ["7 9"] * len(given), row=[0] * len(given))
    assert found == pytest.approx(list(given.values()))


def test_rows_follow_from_the_seed_and_none_is_in_both_files(tmp_path, capsys) -> None:
    files = []
    for folder in ("a", "b"):
        assert tool.main([*words("--rows 5 --numbers 3 --out"), str(tmp_path / folder)]) == 0
        files.append([(tmp_path / folder / f"{name}.jsonl").read_text() for name in ("train", "test")])
    assert files[0] == files[1]
    rows = [json.loads(line) for text in files[0] for line in text.splitlines()]
    assert len({row["answer"] for row in rows}) == len(rows) == 10
    for row in rows:
        first, last = map(int, row["answer"].split())
        assert last == first + 2 and f"from {first} to {last}," in row["prompt"][0]["content"]
    with pytest.raises(SystemExit):
        tool.main([*words("--rows 500 --out"), str(tmp_path)])
    assert "--rows 500 must be 1 to 450" in capsys.readouterr().err

"""Checks tools/benchmarks/cpu_attention.py in small: equal numbers on both sides, all figures, and its refusal."""

import json

import cpu_attention as tool
import pytest

from tests.tools import words

pytestmark = pytest.mark.process


def test_both_sides_are_compared_and_every_figure_is_there(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(tool, "SPANS", ((3, 5, False), (4, 4, True)))
    monkeypatch.setattr(tool, "ROWS", (2,))
    path = tmp_path / "attention.json"
    assert tool.main([*words("--heads 4 --key-heads 2 --size 8 --repeats 2 --json"), str(path)]) == 0
    rows = json.loads(path.read_text())
    assert {(row["what"], row["dtype"]) for row in rows} == {
        (what, dtype)
        for what in ("2 rows, mask", "2 rows, no mask", "3 queries, 5 keys", "4 queries, 4 keys, causal")
        for dtype in ("bfloat16", "float32")
    }
    assert all(row["before_ms"] > 0 and row["now_ms"] > 0 for row in rows)
    assert capsys.readouterr().out.count("\n| ") == len(rows)
    monkeypatch.setattr(tool, "grouped_attention", lambda *given, **more: (given[3].transpose(1, 2), None))
    with pytest.raises(AssertionError):
        tool.main(words("--heads 4 --key-heads 4 --size 8 --repeats 1"))


def test_heads_that_do_not_divide_are_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        tool.main(words("--heads 4 --key-heads 3"))
    assert "--heads 4 must be a multiple of --key-heads 3" in capsys.readouterr().err

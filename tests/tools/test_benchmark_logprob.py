"""Checks that tools/benchmarks/logprob.py, at sizes of a test, reports all its figures, and that they add up."""

import json
import pathlib

import logprob as tool
import pytest
import torch

from tests.tools import words

pytestmark = pytest.mark.process


def test_ratios_are_those_of_the_figures(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is faked: plain takes 8 bytes a token on top of 100, lean 50. For 20 tokens, too many, it extrapolates."""
    monkeypatch.setattr(tool, "measure_memory", lambda path, given, tokens: 100 + 8 * tokens if path == "plain" else 50)
    path, limit = tmp_path / "logprob.json", 2 * 10 * 30 * 4 / 1e9
    sizes = words("--tokens 20 5 10 --vocab 30 --hidden 4 --repeats 2 --chunk-tokens 3 --train-entropy")
    assert tool.main([*sizes, "--plain-limit-gb", str(limit), "--json", str(path)]) == 0
    small, large, beyond = rows = json.loads(path.read_text())["rows"]
    assert [x["tokens"] for x in rows] == [5, 10, 20] and [x["plain_bytes"] for x in rows] == [140, 180, 260]
    assert [x["plain_is_extrapolated"] for x in rows] == [False, False, True]
    assert beyond["memory_ratio"] == 260 / 50 and "plain_s" not in beyond and beyond["lean_s"] > 0
    for row in (small, large):
        assert row["time_ratio"] == row["lean_s"] / row["plain_s"]
        assert row["cpu_ratio"] == row["lean_cpu_s"] / row["plain_cpu_s"]


def test_one_size_is_extrapolated_in_proportion() -> None:
    assert tool.extrapolated({10: 300}, 40) == 1200


@pytest.mark.parametrize("path", ["plain", "lean"])
def test_main_grad_is_the_same_whichever_way(path: str) -> None:
    """Both ways into main_grad leave the gradient there that is otherwise returned, of each step once more."""
    found = []
    for way in ("autograd", "straight"):
        given = tool.parse(words(f"--tokens 5 --vocab 30 --hidden 4 --main-grad {way}"))
        inputs = tool.make_inputs(given, 5)
        for _ in range(2):
            tool.step(path, given, *inputs)
        found.append(inputs[1].main_grad)
    assert found[0].any()
    torch.testing.assert_close(*found)


@pytest.mark.long(seconds=15)
def test_resident_memory_is_that_of_the_path() -> None:
    """Plain holds logits and gradient, 2 x 4096 x 8000 floats, lean two chunks of 64 rows and gradients."""
    given = tool.parse(["--tokens", "4096", "--vocab", "8000", "--hidden", "8", "--chunk-tokens", "64"])
    plain, lean = (tool.measure_memory(path, given, 4096) for path in tool.PATHS)
    assert plain > 2 * 4096 * 8000 * 4
    # seen: 721 MB and 4.5 MB; 2 x 64 x 8000 floats are 4.1 MB, the rest is room for another matrix product's buffers
    assert lean < plain / 20

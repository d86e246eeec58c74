"""Checks arguments and tables of tools/benchmarks/async_modes.py and refill.py.

Both are also run whole, on the embedded engine.
"""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools" / "benchmarks"))

import async_modes as benchmark_async
import refill as benchmark_refill

SMALL = [
    "--engine",
    "transformers",
    "--hidden",
    "64",
    "--layers",
    "1",
    "--samples",
    "4",
    "--response-tokens",
    "8",
    "--rounds",
    "1",
]


@pytest.mark.parametrize(
    ("tool", "given", "words"),
    [
        (benchmark_async, ["--steps", "2"], "--steps 2 must be above 2"),
        (benchmark_async, ["--modes", "prefetch"], "--modes must name sync"),
        (benchmark_async, ["--min-groups", "0"], "--min-groups 0 must be at least 1"),
        (benchmark_refill, ["--dead", "1"], "--dead 1.0 must be at least 0 and below 1"),
        (benchmark_refill, ["--steps", "1"], "--steps 1 must be at least 2"),
    ],
)
def test_bad_arguments_are_named(tool, given, words, capsys):
    with pytest.raises(SystemExit) as ended:
        tool.parse(given)
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_the_embedded_engine_has_no_mode_in_flight():
    assert "streaming, in flight" not in benchmark_async.parse(["--engine", "transformers"]).modes
    assert "streaming, in flight" in benchmark_async.parse([]).modes


def test_overlap_is_of_the_shorter_of_the_two():
    """The overlap is the hidden share of the shorter of production and training.

    Production takes 6 and training 4: 10 in turn, 6 at best; a run of 7 hides 3 of 4.
    """
    rows = {"seconds": 10.0, "production": 6.0, "staleness": 0.0}
    ahead = {"seconds": 7.0, "production": 6.5, "staleness": 1.0}
    sync, prefetch = benchmark_async.table_of({"sync": [rows] * 3, "prefetch": [ahead] * 3})
    assert (sync["overlap"], sync["over sync"]) == (0.0, 1.0)
    assert (prefetch["overlap"], prefetch["over sync"], prefetch["over ideal"]) == (0.75, 0.7, 7.0 / 6.0)


def test_a_live_group_costs_what_the_dead_ones_took():
    row = {
        "groups with signal": 8.0,
        "tokens": 800.0,
        "rollout s": 1.0,
        "logprob s": 1.0,
        "update s": 2.0,
        "all s": 4.0,
    }
    (found,) = benchmark_refill.table_of({"skip": [row, row]})
    assert found["tokens a live group"] == 100.0 and found["s a live group"] == 0.5


@pytest.mark.long(seconds=50)
@pytest.mark.distributed
def test_the_whole_of_both(tmp_path, capsys):
    """Every mode runs with its own staleness, and refilled rollouts have no group without signal.

    Each of the two tools takes a few seconds.
    """
    path = tmp_path / "async.json"
    given = [
        "--modes",
        "sync",
        "prefetch",
        "--prompts",
        "4",
        "--min-groups",
        "2",
        "--steps",
        "4",
        "--json",
        str(path),
        *SMALL,
    ]
    assert benchmark_async.main(given) == 0
    assert [row["staleness"] for row in json.loads(path.read_text())["modes"]] == [0.0, 1.0]
    path = tmp_path / "refill.json"
    assert benchmark_refill.main(["--prompts", "6", "--steps", "3", "--json", str(path), *SMALL]) == 0
    modes = {row["mode"]: row for row in json.loads(path.read_text())["modes"]}
    assert (
        modes["refill"]["groups with signal"]
        > 4
        > modes["skip"]["groups with signal"]
        == modes["train all"]["groups with signal"]
    )
    assert modes["refill"]["tokens"] > modes["skip"]["tokens"] == modes["train all"]["tokens"]
    assert "overlap" in capsys.readouterr().out

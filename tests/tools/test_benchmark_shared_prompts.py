"""Checks tools/benchmarks/shared_prompts.py by small real runs, whose figures follow from one another."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.patience import patient
from tests.workers.environment import TORCHRUN

TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS / "benchmarks"))

import shared_prompts as benchmark  # noqa: E402

pytestmark = pytest.mark.process

SIZES = {"groups": 4, "group-size": 4, "response-tokens": 8, "hidden": 64, "layers": 2, "vocab": 64, "repeats": 1}
SMALL = [part for name, value in SIZES.items() for part in (f"--{name}", str(value))]


def run_tool(out: pathlib.Path, *arguments: str) -> list[dict]:
    command = [sys.executable, "-m", *TORCHRUN, "2"]
    command += [str(TOOLS / "benchmarks" / "shared_prompts.py"), *SMALL, *arguments, "--json", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(300), env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())["rows"]


@pytest.mark.parametrize("layout", [("--dp", "2"), ("--pp", "2", "--virtual-clock")])
def test_the_figures_follow_from_one_another(tmp_path: pathlib.Path, layout: tuple[str, ...]) -> None:
    (row,) = run_tool(tmp_path / "rows.json", *layout, "--ratio", "4:1")
    lengths = benchmark.drawn(benchmark_settings(), "4:1", 4)
    apart = int((lengths.prompts + lengths.responses - 1).sum())
    assert row["dense before"]["tokens"] == apart and row["dead_share"] == 0.75
    ranks = 2 if layout[0] == "--dp" else 1
    once = int((lengths.responses - 1).sum()) + lengths.prompts[0] * 4
    assert once <= row["dense after"]["tokens"] <= once + (ranks - 1) * lengths.prompts[0]
    survivors = lengths.signal
    assert row["skip before"]["tokens"] == int((lengths.prompts + lengths.responses - 1)[survivors].sum())
    for way in ("dense before", "dense after", "skip before", "skip after"):
        assert row[way]["ratio"] == pytest.approx(row["dense before"]["seconds"] / row[way]["seconds"])
        assert row[way]["share_of_ideal"] == pytest.approx(row[way]["ratio"] / row[way]["ideal"])
        assert row[way]["share_of_planned"] == pytest.approx(row[way]["ratio"] / row[way]["planned_ideal"])
        assert row[way]["memory_bytes"] > 0
    assert row["dense before"]["ideal"] == row["dense before"]["planned_ideal"] == 1.0
    # a pass costs a third of an update, and one that is gone nothing
    assert row["skip after"]["ideal"] > row["skip before"]["ideal"] * 4 / 3
    assert row["dense after"]["ideal"] > apart / row["dense after"]["tokens"]


def benchmark_settings():
    given = [part for name, value in SIZES.items() if name != "group-size" for part in (f"--{name}", str(value))]
    return benchmark.parse(given)


def test_a_ratio_that_is_none_is_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        benchmark.parse(["--ratio", "4/1"])
    assert "--ratio 4/1 is not of the form PROMPT:RESPONSE" in capsys.readouterr().err


def test_a_batch_without_any_signal_is_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        benchmark.parse(["--groups", "2"])
    assert "--dead-share 0.75 of --groups 2 leaves no group with signal" in capsys.readouterr().err


def test_a_recorded_rollout_without_any_signal_is_refused(tmp_path: pathlib.Path) -> None:
    row = {"rollout": 0, "group": 0, "prompt_tokens": 5, "response_tokens": 4, "loss_tokens": 4}
    trace = tmp_path / "trace.jsonl"
    for second, dead in ((0.0, False), (1.0, True)):
        trace.write_text("".join(json.dumps(row | {"reward": reward}) + "\n" for reward in (1.0, second)))
        given = benchmark.parse(["--trace", str(trace)])
        if dead:
            with pytest.raises(SystemExit, match=r"trace\.jsonl: no group of its last rollout has signal"):
                benchmark.recorded(given)
        else:
            assert benchmark.recorded(given).signal.all()


def test_dead_groups_are_whole() -> None:
    lengths = benchmark.drawn(benchmark_settings(), "1:1", 8)
    by_group = [set(lengths.signal[lengths.groups == g].tolist()) for g in range(4)]
    assert sorted(map(sorted, by_group)) == [[False], [False], [False], [True]]
    assert np.ptp(lengths.responses) > 0

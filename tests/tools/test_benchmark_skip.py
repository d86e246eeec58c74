"""Checks tools/benchmarks/skip.py and planner.py by small real runs, whose figures follow from one another."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tests.patience import patient
from tests.workers.environment import TORCHRUN

TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS / "benchmarks"))

import planner as benchmark_plan  # noqa: E402
import skip as benchmark_skip  # noqa: E402
import skip_table  # noqa: E402
from skip_table import plan_clock, without_overhead  # noqa: E402

from megatron_rl.planning.cost import CostModel, StageCost  # noqa: E402
from megatron_rl.planning.plan import PlanRules, plan_steps  # noqa: E402

pytestmark = pytest.mark.process

SIZES = {"groups": 6, "group-size": 2, "mean-tokens": 16, "max-tokens-per-microbatch": 64, "hidden": 64, "vocab": 64}
SMALL = [part for name, value in SIZES.items() for part in (f"--{name}", str(value))]


def run_tool(out: pathlib.Path, processes: int, *arguments: str) -> list[dict]:
    command = [sys.executable, "-m", *TORCHRUN, str(processes)]
    command += [str(TOOLS / "benchmarks" / "skip.py"), *SMALL, *arguments, "--json", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(600), env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())["rows"]


@pytest.mark.long(seconds=20)
def test_shares_are_those_of_the_figures(tmp_path: pathlib.Path) -> None:
    """The reported shares are those of the reported times and tokens.

    Wall time is taken on one process, of one batch, so that medians are of repeats alone.
    """
    half, ghost = run_tool(tmp_path / "skip.json", 1, "--layers", "2", "--repeats", "2", "--dead-share", "0.5", "1.0")
    assert (
        half["ratio"] == half["dense_s"] / half["skip_s"]
        and half["ideal"] == half["dense_tokens"] / half["surviving_tokens"]
    )
    assert (
        half["share_of_ideal"] == half["ratio"] / half["ideal"]
        and half["share_of_planned"] == half["ratio"] / half["planned_ideal"]
    )
    assert half["fixed_fraction"] == half["optimizer_step_s"] / half["dense_s"]
    assert len(half["dense_over_predicted"]) == len(half["skip_over_predicted"]) == 2
    factors = np.array(half["skip_over_predicted"])
    assert half["skip_spread"] == pytest.approx(factors.std() / factors.mean())
    assert ghost["surviving_tokens"] == 0 and ghost["ghost_over_optimizer_step"] > 0 and "ideal" not in ghost


@pytest.mark.long
def test_virtual_clock_runs_more_stages_than_cores(tmp_path: pathlib.Path) -> None:
    (row,) = run_tool(
        tmp_path / "clock.json",
        4,
        "--layers",
        "8",
        "--pp",
        "4",
        "--virtual-pipeline",
        "2",
        "--virtual-clock",
        "--calibrate",
        "--batches",
        "2",
        "--repeats",
        "1",
        "--dead-share",
        "0.5",
    )
    assert min(row["dense_s"], row["skip_s"]) > 0 and "optimizer_step_s" not in row
    assert 0 < row["surviving_tokens"] < row["dense_tokens"]
    assert all(m % 4 == 0 for m in row["dense_microbatches"] + row["skip_microbatches"])


def test_plan_clock_without_overhead_on_one_stage_is_the_ratio_of_tokens() -> None:
    model = CostModel(stages=(StageCost(overhead=50.0, token=2.0, square=0.0),))
    lengths, signal, rules = np.array([10, 20, 30, 40]), np.array([True, False, True, False]), PlanRules(max_tokens=50)
    dense, skip = (
        plan_steps("train", [np.arange(4)], lengths, signal, rules, drops=drops).mini_batches[0]
        for drops in (False, True)
    )
    assert (
        plan_clock(without_overhead(model), dense, lengths) == 200.0
        and plan_clock(without_overhead(model), skip, lengths) == 80.0
    )
    assert plan_clock(model, dense, lengths) == 200.0 + 50.0 * len(dense.microbatch_offsets[1:])


def test_processes_that_do_not_match_the_degrees_are_named(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        benchmark_skip.parse(["--dp", "3"])
    assert "--tp 1 x --pp 1 x --dp 3 is 3 and 1 processes were started" in capsys.readouterr().err


def test_planning_is_timed_at_every_size(capsys: pytest.CaptureFixture) -> None:
    assert benchmark_plan.main(["--samples", "100", "200", "--dp", "4", "--pp", "2", "--repeats", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in lines[2:]] == ["100 samples", "200 samples"]


def test_share_of_the_peak_is_that_of_the_tokens_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """With attention alone, a token costs its mean context: half of Σ length² over a second of 1,000 FLOP/s."""
    monkeypatch.setattr(skip_table, "HOST", SimpleNamespace(peak_flops=lambda: 1000.0))
    monkeypatch.setattr(skip_table, "flops_per_token", lambda shape, mean_context: mean_context)
    plans = {"dense": SimpleNamespace(order=np.array([0, 1])), "skip": SimpleNamespace(order=np.array([1]))}
    backend = SimpleNamespace(shape=None, topology=SimpleNamespace(world_size=2))
    row = {"dense_tokens": 30, "dense_s": 0.5, "skip_s": 0.25}
    found = skip_table._rate_fields(row, np.array([10, 20]), plans, backend)
    assert found["dense_tokens_per_s"] == 60.0
    assert found["dense_mfu"] == pytest.approx((100 + 400) / 2 / 0.5 / 1000 / 2)
    assert found["skip_mfu"] == pytest.approx(400 / 2 / 0.25 / 1000 / 2)
    ghost = {**plans, "skip": SimpleNamespace(order=np.array([], dtype=int))}
    assert "skip_mfu" not in skip_table._rate_fields(row, np.array([10, 20]), ghost, backend)

"""Checks skip.py, shared_prompts.py and planner.py by small real runs, whose figures follow from one another."""

import json
import pathlib
from types import SimpleNamespace

import numpy as np
import planner as benchmark_plan
import pytest
import shared_prompts
import skip_table
from skip_table import plan_clock, without_overhead

from megatron_rl.planning.cost import CostModel, StageCost
from megatron_rl.planning.plan import PlanRules, plan_steps
from tests.tools import BENCHMARKS, words
from tests.tools.processes import run_on_ranks
from tests.workers.nursery import Nursery

SIZES = "--groups 6 --group-size 2 --mean-tokens 16 --max-tokens-per-microbatch 64 --hidden 64 --vocab 64"
SHARED = "--groups 4 --response-tokens 8 --hidden 64 --layers 2 --vocab 64 --repeats 1"


def run_tool(nursery: Nursery, world: int, folder: pathlib.Path, name: str, given: str) -> list[dict]:
    out = folder / "rows.json"
    code, said = run_on_ranks(nursery, world, folder, BENCHMARKS / f"{name}.py", *words(given), "--json", str(out))
    assert code == 0, said
    return json.loads(out.read_text())["rows"]


@pytest.mark.long(seconds=20)
def test_shares_are_those_of_the_figures(nursery: Nursery, tmp_path: pathlib.Path) -> None:
    """Wall time is taken on one process, of one batch, so that medians are of repeats alone."""
    half, ghost = run_tool(nursery, 1, tmp_path, "skip", f"{SIZES} --layers 2 --repeats 2 --dead-share 0.5 1.0")
    assert half["ratio"] == half["dense_s"] / half["skip_s"]
    assert half["ideal"] == half["dense_tokens"] / half["surviving_tokens"]
    assert half["share_of_ideal"] == half["ratio"] / half["ideal"]
    assert half["share_of_planned"] == half["ratio"] / half["planned_ideal"]
    assert half["fixed_fraction"] == half["optimizer_step_s"] / half["dense_s"]
    assert len(half["dense_over_predicted"]) == len(half["skip_over_predicted"]) == 2
    factors = np.array(half["skip_over_predicted"])
    assert half["skip_spread"] == pytest.approx(factors.std() / factors.mean())
    assert ghost["surviving_tokens"] == 0 and ghost["ghost_over_optimizer_step"] > 0 and "ideal" not in ghost


@pytest.mark.long
def test_virtual_clock_runs_more_stages_than_cores(nursery: Nursery, tmp_path: pathlib.Path) -> None:
    layout = "--layers 8 --pp 4 --virtual-pipeline 2 --virtual-clock --calibrate --batches 2 --repeats 1"
    (row,) = run_tool(nursery, 4, tmp_path, "skip", f"{SIZES} {layout} --dead-share 0.5")
    assert min(row["dense_s"], row["skip_s"]) > 0 and "optimizer_step_s" not in row
    assert 0 < row["surviving_tokens"] < row["dense_tokens"]
    assert all(m % 4 == 0 for m in row["dense_microbatches"] + row["skip_microbatches"])


def test_plan_clock_without_overhead_on_one_stage_is_the_ratio_of_tokens() -> None:
    model = CostModel(stages=(StageCost(overhead=50.0, token=2.0, square=0.0),))
    lengths, signal, rules = np.array([10, 20, 30, 40]), np.array([True, False, True, False]), PlanRules(max_tokens=50)
    plans = [plan_steps("train", [np.arange(4)], lengths, signal, rules, drops=drops) for drops in (False, True)]
    dense, skip = (plan.mini_batches[0] for plan in plans)
    assert [plan_clock(without_overhead(model), plan, lengths) for plan in (dense, skip)] == [200.0, 80.0]
    assert plan_clock(model, dense, lengths) == 200.0 + 50.0 * len(dense.microbatch_offsets[1:])


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


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["--dp 2", "--pp 2 --virtual-clock"])
def test_figures_of_shared_prompts_follow_from_one_another(nursery: Nursery, tmp_path: pathlib.Path, layout: str):
    (row,) = run_tool(nursery, 2, tmp_path, "shared_prompts", f"{SHARED} --group-size 4 {layout} --ratio 4:1")
    lengths = shared_prompts.drawn(shared_prompts.parse(words(SHARED)), "4:1", 4)
    apart = int((lengths.prompts + lengths.responses - 1).sum())
    assert row["dense before"]["tokens"] == apart and row["dead_share"] == 0.75
    ranks = 2 if layout == "--dp 2" else 1
    once = int((lengths.responses - 1).sum()) + lengths.prompts[0] * 4
    assert once <= row["dense after"]["tokens"] <= once + (ranks - 1) * lengths.prompts[0]
    assert row["skip before"]["tokens"] == int((lengths.prompts + lengths.responses - 1)[lengths.signal].sum())
    for way in ("dense before", "dense after", "skip before", "skip after"):
        assert row[way]["ratio"] == pytest.approx(row["dense before"]["seconds"] / row[way]["seconds"])
        assert row[way]["share_of_ideal"] == pytest.approx(row[way]["ratio"] / row[way]["ideal"])
        assert row[way]["share_of_planned"] == pytest.approx(row[way]["ratio"] / row[way]["planned_ideal"])
        assert row[way]["memory_bytes"] > 0
    assert row["dense before"]["ideal"] == row["dense before"]["planned_ideal"] == 1.0
    # a pass costs a third of an update, and one that is gone nothing
    assert row["skip after"]["ideal"] > row["skip before"]["ideal"] * 4 / 3
    assert row["dense after"]["ideal"] > apart / row["dense after"]["tokens"]


def test_a_recorded_rollout_without_any_signal_is_refused_and_dead_groups_are_whole(tmp_path: pathlib.Path) -> None:
    row = {"rollout": 0, "group": 0, "prompt_tokens": 5, "response_tokens": 4, "loss_tokens": 4}
    trace = tmp_path / "trace.jsonl"
    given = shared_prompts.parse(["--trace", str(trace)])
    trace.write_text("".join(json.dumps(row | {"reward": reward}) + "\n" for reward in (1.0, 0.0)))
    assert shared_prompts.recorded(given).signal.all()
    trace.write_text((json.dumps(row | {"reward": 1.0}) + "\n") * 2)
    with pytest.raises(SystemExit, match=r"trace\.jsonl: no group of its last rollout has signal"):
        shared_prompts.recorded(given)
    lengths = shared_prompts.drawn(shared_prompts.parse(words(SHARED)), "1:1", 8)
    by_group = [set(lengths.signal[lengths.groups == g].tolist()) for g in range(4)]
    assert sorted(map(sorted, by_group)) == [[False], [False], [False], [True]] and np.ptp(lengths.responses) > 0

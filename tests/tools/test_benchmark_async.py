"""Checks the benchmarks of rollouts: async_modes.py, refill.py and bitwise.py whole too, steps of stragglers.py."""

import json
from types import SimpleNamespace

import async_modes as benchmark_async
import numpy as np
import pytest
import refill as benchmark_refill
import start_order
import stragglers

from megatron_rl.config import load_config
from tests.tools import BENCHMARKS

SIZES = ["--hidden", "64", "--layers", "1", "--response-tokens", "8", "--rounds", "1"]
SMALL = [*SIZES, "--engine", "transformers", "--samples", "4"]
PROMPTS, ROLLOUTS = 12, 5


def test_the_embedded_engine_has_no_mode_in_flight():
    assert "streaming, in flight" not in benchmark_async.parse(["--engine", "transformers"]).modes
    assert "streaming, in flight" in benchmark_async.parse([]).modes


def test_overlap_is_of_the_shorter_of_the_two_and_a_live_group_costs_what_the_dead_ones_took():
    """Production takes 6 and training 4: 10 in turn, 6 at best; a run of 7 hides 3 of 4."""
    rows = {"seconds": 10.0, "production": 6.0, "staleness": 0.0}
    ahead = {"seconds": 7.0, "production": 6.5, "staleness": 1.0}
    sync, prefetch = benchmark_async.table_of({"sync": [rows] * 3, "prefetch": [ahead] * 3})
    assert (sync["overlap"], sync["over sync"]) == (0.0, 1.0)
    assert (prefetch["overlap"], prefetch["over sync"], prefetch["over ideal"]) == (0.75, 0.7, 7.0 / 6.0)
    row = {"groups with signal": 8.0, "tokens": 800.0, "rollout s": 1.0, "logprob s": 1.0, "update s": 2.0}
    (found,) = benchmark_refill.table_of({"skip": [row | {"all s": 4.0}] * 2})
    assert found["tokens a live group"] == 100.0 and found["s a live group"] == 0.5


@pytest.mark.long(seconds=50)
@pytest.mark.distributed
def test_the_whole_of_both(tmp_path, capsys):
    given = ["--modes", "sync", "prefetch", "--prompts", "4", "--min-groups", "2", "--steps", "4", "--json"]
    assert benchmark_async.main([*given, str(tmp_path / "async.json"), *SMALL]) == 0
    assert [row["staleness"] for row in json.loads((tmp_path / "async.json").read_text())["modes"]] == [0.0, 1.0]
    path = tmp_path / "refill.json"
    assert benchmark_refill.main(["--prompts", "6", "--steps", "3", "--json", str(path), *SMALL]) == 0
    modes = {row["mode"]: row for row in json.loads(path.read_text())["modes"]}
    refill, skip, every = (modes[name] for name in ("refill", "skip", "train all"))
    assert refill["groups with signal"] > 4 > skip["groups with signal"] == every["groups with signal"]
    assert refill["tokens"] > skip["tokens"] == every["tokens"] and "overlap" in capsys.readouterr().out


@pytest.mark.long
def test_bitwise_alone_has_no_gap(nursery, tmp_path):
    path = tmp_path / "table.json"
    given = [*SIZES, "--prompts", "2", "--samples", "2", "--rollouts", "1", "--json", str(path)]
    code, printed = nursery.run_script(BENCHMARKS / "bitwise.py", *given)
    assert code == 0, printed
    table = json.loads(path.read_text())
    assert set(table) == {"ordinary", "passes", "bitwise"} and "ratio" in printed
    assert table["bitwise"]["logprob_gap_max"] == 0.0
    assert all(row["rollout_s"] > 0 and row["update_s"] > 0 for row in table.values())


@pytest.mark.parametrize("slots", [1, 5, 12, 40])
def test_steps_of_stragglers_equal_a_heaps_without_them_and_lie_between_the_bound_and_those_with_them(slots: int):
    lengths = np.random.default_rng(slots).integers(1, 200, size=PROMPTS * ROLLOUTS)
    without = stragglers.count_steps(lengths, 0.0, PROMPTS, slots, ROLLOUTS)
    assert without == sum(start_order.count_steps(part, slots) for part in np.split(lengths, ROLLOUTS))
    for share in (0.1, 0.25, 0.5):
        steps = stragglers.count_steps(lengths, share, PROMPTS, slots, ROLLOUTS)
        assert max(lengths.max(), -(-lengths.sum() // slots)) <= steps <= without
    assert slots == 1 or steps < without


def test_the_engines_measurements_are_compared_round_by_round(monkeypatch, tmp_path):
    """Shares and lengths go to the engine in turn; a stand-in takes a second for each token of the longest sample."""
    engine = SimpleNamespace(close=lambda: None)
    given = stragglers.parse(["--prompts", "4", "--rollouts", "2", "--rounds", "3"])
    monkeypatch.setattr(start_order, "open_engine", lambda *_: (engine, load_config(None, []), {}))
    monkeypatch.setattr(stragglers, "time_rollouts", lambda *given: given[4].max())
    rows = stragglers.measure(given, tmp_path)
    assert [row["share"] for row in rows] == ["evenly dealt", "0", "0.125", "0.25"]
    assert rows[0]["of_the_bound"] == 1.0 and rows[1]["of_the_bound"] > 1.0

"""Checks the figures of tools/benchmarks/whole_runs.py on runs written by hand."""

import importlib.util

import pytest

from tests.tools import BENCHMARKS

spec = importlib.util.spec_from_file_location("whole_runs", BENCHMARKS / "whole_runs.py")
whole_runs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(whole_runs)
KEY = "eval/held_out/mean@4"


def rows(tokens: list[float], scores: list[float | None]) -> list[dict]:
    """Return two steps a rollout, the second with a score if there is one, after an evaluation before the first."""
    found: list[dict] = [{"step": 0, KEY: 0.1, "time/eval_s": 50.0}]
    for number, (count, score) in enumerate(zip(tokens, scores, strict=True), start=1):
        first = {"rollout": number, "rollout/tokens": count, "time/rollout_s": 2.0, "time/weight_sync_s": 0.5}
        second = {"rollout": number, "time/step_s": 1.0} | ({} if score is None else {KEY: score})
        found += [first | {"time/step_s": 3.0}, second]
    return found


def test_figures_are_sums_up_to_the_first_evaluation_at_the_target():
    found = rows([100.0, 90.0, 80.0], [0.2, 0.55, 0.5])
    whole = {"rollouts": 3.0, "tokens": 270.0, "rollout_s": 7.5, "step_s": 12.0}
    assert whole_runs.figures_until(found, None) == whole
    half = {"rollouts": 2.0, "tokens": 190.0, "rollout_s": 5.0, "step_s": 8.0}
    assert whole_runs.figures_until(found, 0.5) == half
    assert whole_runs.figures_until(found, 0.6) is None


def test_ratios_are_medians_over_seeds_and_missing_where_a_run_never_gets_there():
    today = {0: rows([100.0, 100.0], [0.5, 0.9]), 1: rows([100.0, 100.0], [0.9, 0.9])}
    other = {0: rows([50.0, 50.0], [0.9, 0.9]), 1: rows([40.0, 40.0], [0.9, 0.9])}
    result = whole_runs.compared({"today": today, "adaptive": other}, None)
    assert result["target"] == 0.9 and result["ratios"]["today"]["tokens"] == 1.0
    assert result["ratios"]["adaptive"]["tokens"] == pytest.approx((200 / 50 + 100 / 40) / 2)
    assert "| adaptive | 1 | 0.900 | 2 | 80 |" in whole_runs.table_of(result)
    late = whole_runs.compared({"today": today, "adaptive": {0: rows([1.0], [0.3]), 1: rows([1.0], [0.9])}}, 0.9)
    assert "adaptive" not in late["ratios"] and "not reached" in whole_runs.table_of(late)


def test_a_way_of_ones_own_joins_others_and_an_unknown_one_is_named(capsys):
    given = whole_runs.parse(["--out", "x", "--way", "ends=reward.decided=./a.py:b", "--ways", "today", "both+ends"])
    assert given.settings["ends"] == ("reward.decided=./a.py:b",) and given.ways == ["today", "both+ends"]
    with pytest.raises(SystemExit):
        whole_runs.parse(["--out", "x", "--ways", "today+end"])
    wanted = "--ways end is none of today, rloo, adaptive, speculation, both; --way end=SETTING adds it"
    assert wanted in capsys.readouterr().err

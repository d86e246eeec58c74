"""Checks simulate_cluster_check.py without measuring: its fit finds the rates that made the times."""

import argparse

import numpy as np
import pytest
import simulate_cluster_check as checked
import skip as benchmark_skip

pytestmark = pytest.mark.process

THETA = np.array([2e-11, 5e-11, 4e-4, 3e-9, 2e-9, 1e-3])


def planned(settings: dict) -> dict:
    job, signal = checked.case_of(settings, 0.5)
    rules = checked.plan_rules(job.config, job.degrees, job.shape)
    plans = {kind: job.plan(rules, signal, drops=kind == "skip") for kind in ("dense", "skip")}
    return {f"{kind}_microbatches": plan.mini_batches[0].num_microbatches.tolist() for kind, plan in plans.items()}


def records(monkeypatch) -> list[dict]:
    """Return the records that six launches would measure under THETA, to the last digit."""
    made = []
    for launch in (checked.LAUNCHES[i] for i in (0, 1, 4, 5, 8, 10)):
        monkeypatch.setenv("WORLD_SIZE", str(launch["dp"] * launch["pp"]))
        given = argparse.Namespace(groups=8, mean_tokens=64, repeats=1, dead_share=[0.5])
        settings = vars(benchmark_skip.parse(checked.arguments_of(launch, given)))
        row = {"dead_share": 0.5, "dense_s": 1.0, "skip_s": 1.0, "optimizer_step_s": 1.0} | planned(settings)
        record = {"settings": settings, "machine": "a laptop", "rows": [row]}
        times = {each.kind: each.predict(THETA) for each in checked.cases([record])}
        record["rows"][0] |= {"dense_s": times["dense"], "skip_s": times["skip"], "optimizer_step_s": times["step"]}
        made.append(record)
    return made


def test_times_are_predicted_by_launches_that_were_left_out(monkeypatch) -> None:
    """The bound is 1e-3, as the fit's slopes are differences. In its own fit a doubled time would half hide."""
    monkeypatch.setattr(checked, "ROUNDS", 3)  # of the fit: times that are exact to the last digit settle in two
    given = records(monkeypatch)
    found = checked.check(given)
    assert found["median_error"] < 1e-3 and len(found["rows"]) == 12
    table = checked.markdown(found).splitlines()
    assert "a laptop: 12 predictions of 6 launches" in table[0]
    assert len(table) == 4 + 12 and {line.count("|") for line in table[2:]} == {7}
    for row in found["rows"][1::2]:
        assert row["predicted_gain"] == pytest.approx(row["measured_gain"], rel=2e-3) and row["measured_gain"] > 1
    given[0]["rows"][0]["dense_s"] *= 2
    spoiled = {row["name"]: row["error"] for row in checked.check(given)["rows"]}
    assert spoiled["DP1 PP1 h256 l4 cap1024 dense"] == pytest.approx(-0.5, abs=1e-2)


def test_times_of_another_planner_are_refused(monkeypatch) -> None:
    given = records(monkeypatch)
    given[0]["rows"][0]["skip_microbatches"] = [99]
    with pytest.raises(ValueError, match=r"skip update was measured with \[99\] micro-batches per rank"):
        checked.check(given)
    with pytest.raises(ValueError, match="1 launch.* measure at least 2"):
        checked.check(given[:1])


def test_nonnegative_least_squares_meets_its_conditions() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        a, b = random.normal(size=(12, 6)) * 10.0 ** random.integers(-6, 6, 6), random.normal(size=12)
        x = checked.nonnegative_least_squares(a, b)
        slope = a.T @ (a @ x - b) / np.linalg.norm(a, axis=0)
        assert (x >= 0).all() and (np.abs(slope[x > 0]) < 1e-6).all() and (slope[x == 0] > -1e-6).all()

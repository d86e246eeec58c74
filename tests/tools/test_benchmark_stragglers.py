"""Counted rollouts of tools/benchmarks/stragglers.py: without stragglers those of a heap, with them no more steps."""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools" / "benchmarks"))
import start_order
import stragglers

from megatron_rl.config import load_config

PROMPTS, ROLLOUTS = 12, 5


def drawn(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 200, size=PROMPTS * ROLLOUTS)


@pytest.mark.parametrize("slots", [1, 5, 12, 40])
def test_rollouts_without_stragglers_come_one_after_the_other(slots: int) -> None:
    lengths = drawn(slots)
    alone = [start_order.count_steps(part, slots) for part in np.split(lengths, ROLLOUTS)]
    assert stragglers.count_steps(lengths, 0.0, PROMPTS, slots, ROLLOUTS) == sum(alone)


@pytest.mark.parametrize("slots", [1, 5, 12, 40])
def test_stragglers_take_between_the_bound_and_the_steps_without_them(slots: int) -> None:
    lengths = drawn(slots)
    without = stragglers.count_steps(lengths, 0.0, PROMPTS, slots, ROLLOUTS)
    for share in (0.1, 0.25, 0.5):
        steps = stragglers.count_steps(lengths, share, PROMPTS, slots, ROLLOUTS)
        assert max(lengths.max(), -(-lengths.sum() // slots)) <= steps <= without
    assert slots == 1 or steps < without


def test_the_engines_measurements_are_compared_round_by_round(monkeypatch, tmp_path) -> None:
    """Shares and lengths go to the engine in turn; a stand-in takes a second for each token of the longest sample."""

    class Engine:
        def close(self) -> None:
            pass

    config = load_config(None, [])
    given = stragglers.parse(["--prompts", "4", "--rollouts", "2", "--rounds", "3"])
    monkeypatch.setattr(start_order, "open_engine", lambda *_: (Engine(), config, {}))
    monkeypatch.setattr(stragglers, "time_rollouts", lambda *given: given[4].max())
    rows = stragglers.measure(given, tmp_path)
    assert [row["share"] for row in rows] == ["evenly dealt", "0", "0.125", "0.25"]
    assert rows[0]["of_the_bound"] == 1.0 and rows[1]["of_the_bound"] > 1.0

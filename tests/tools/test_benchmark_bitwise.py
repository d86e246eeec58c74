"""The benchmark of rollout.bitwise: its smallest run measures all three kinds, and bitwise alone has no gap."""

from __future__ import annotations

import json
import pathlib

import pytest

from tests.workers.nursery import Nursery

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "benchmarks" / "bitwise.py"


@pytest.mark.long
def test_the_smallest_run(nursery: Nursery, tmp_path: pathlib.Path) -> None:
    sizes = ("--hidden", "64", "--layers", "1", "--prompts", "2", "--samples", "2", "--response-tokens", "8")
    path = tmp_path / "table.json"
    code, printed = nursery.run_script(TOOL, *sizes, "--rollouts", "1", "--rounds", "1", "--json", str(path))
    assert code == 0, printed
    table = json.loads(path.read_text())
    assert set(table) == {"ordinary", "passes", "bitwise"} and "ratio" in printed
    assert table["bitwise"]["logprob_gap_max"] == 0.0
    assert all(row["rollout_s"] > 0 and row["update_s"] > 0 for row in table.values())

"""The calculator example as a user starts it: a few steps, and the whole run with what its README says."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

from megatron_rl.environment.calculator import Calculator
from megatron_rl.types import Prompt
from tests.runs.calculator_game import few_steps, learned

ROOT = pathlib.Path(__file__).resolve().parents[2]


def prepare_module():
    spec = importlib.util.spec_from_file_location("calculator_prepare", ROOT / "examples" / "calculator" / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_solution_is_an_episode_that_the_calculator_agrees_with() -> None:
    rows = prepare_module().generate(0.3, seed=0)
    called = [row for row in rows if isinstance(row["solution"], list)]
    assert len({row["prompt"] for row in rows}) == len(rows) == 8100 and len(called) == 2430
    for row in rows[:500]:
        calculator = Calculator()
        calculator.reset(Prompt(prompt_id="0@0", text=row["prompt"], token_ids=(1,), columns=row))
        turns = row["solution"] if isinstance(row["solution"], list) else [{"content": row["solution"]}]
        if len(turns) > 1:
            assert calculator.step(turns[0]["content"]).observation == turns[1]["content"]
        assert calculator.step(turns[-1]["content"]).reward == 1.0
    assert [row for row in rows if row["solution"] == row["answer"]] and prepare_module().generate(0.3, seed=0) == rows


@pytest.mark.long
def test_a_few_steps(tmp_path) -> None:
    rows = few_steps("calculator", tmp_path)
    warm = [row["train/loss"] for row in rows if row["phase"] == "warmup"]
    assert warm[-1] < warm[0]


@pytest.mark.long(seconds=150)
def test_the_model_learns_to_call_the_calculator(tmp_path) -> None:
    learned("calculator", tmp_path, least_turns=1.9)

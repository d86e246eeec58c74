"""Checks the learning rate of every step, ghosts included, against the formulas of a linear warm-up and each decay."""

import math

import pytest

from tests.equality.rig import open_rig
from tests.workers.pool import Pool

LR, MIN_LR, WARMUP, STEPS = 0.01, 0.001, 3, 12


def wanted_rate(schedule: str, step: int, decay_steps: int) -> float:
    """Compute a step's rate, counted from 0: up in WARMUP equal parts from LR / (WARMUP + 1), then down to MIN_LR."""
    if step <= WARMUP:
        first = LR / (WARMUP + 1)
        return first + (LR - first) * step / WARMUP
    if schedule == "constant":
        return LR
    gone = min(1.0, (step - WARMUP) / (decay_steps - WARMUP))
    falls = (1 + math.cos(math.pi * gone)) / 2 if schedule == "cosine" else 1 - gone
    return MIN_LR + (LR - MIN_LR) * falls


def rates(rank: int, world: int, overrides: tuple[str, ...]) -> list[float]:
    given = (f"optimizer.lr={LR}", f"optimizer.min_lr={MIN_LR}", f"optimizer.warmup_steps={WARMUP}", *overrides)
    with open_rig("qwen2_tied", *given, samples=4, total_steps=STEPS, layers=1) as rig:
        return [rig.ghost().learning_rate for _ in range(STEPS)]


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
@pytest.mark.parametrize("decay_steps", [None, 7])
def test_learning_rates_equal_the_formula(pool: Pool, schedule: str, decay_steps: int | None) -> None:
    """The decay ends at ``optimizer.decay_steps``, or with the run; no step has a rate of 0."""
    overrides = f"optimizer.schedule={schedule}", f"optimizer.decay_steps={decay_steps or 'null'}"
    (found,) = pool.run(1, rates, overrides, timeout_s=60)
    wanted = [wanted_rate(schedule, step, decay_steps or STEPS) for step in range(STEPS)]
    assert found == pytest.approx(wanted, rel=1e-12)

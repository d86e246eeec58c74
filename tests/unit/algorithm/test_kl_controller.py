"""algorithm/kl_controller.py against its recursion, one update at a time."""

import random

import pytest

from megatron_rl.algorithm.kl_controller import KLCoefficient


def naive_coefficient(value: float, target: float, horizon: int, measured: list[tuple[float, int]]) -> float:
    for kl, num_samples in measured:
        error = sorted([-0.2, kl / target - 1, 0.2])[1]
        value = value * (1 + error * num_samples / horizon)
    return value


def test_coefficient_equals_the_recursion() -> None:
    draw = random.Random(0)
    measured = [(draw.uniform(-2, 18), 64 * (1 + i % 3)) for i in range(100)]
    coefficient = KLCoefficient(value=0.2, target=6.0, horizon=10_000)
    for kl, num_samples in measured:
        coefficient = coefficient.updated(kl, num_samples)
    # 100 multiplications
    assert coefficient.value == pytest.approx(naive_coefficient(0.2, 6.0, 10_000, measured), rel=1e-13)
    assert coefficient.value != pytest.approx(0.2, rel=1e-3)
    assert (coefficient.target, coefficient.horizon) == (6.0, 10_000)


def test_coefficient_moves_to_the_target_within_the_clip_a_fixed_one_not_and_nan_is_an_error() -> None:
    start = KLCoefficient(value=0.2, target=6.0, horizon=10_000)
    assert start.updated(9.0, 256).value == pytest.approx(0.201024, rel=1e-12)  # the docstring's
    assert start.updated(6.0, 256).value == 0.2
    assert start.updated(1e9, 256) == start.updated(7.2, 256) == start.updated(float("inf"), 256)
    assert start.updated(-3.0, 256).value == pytest.approx(0.2 * (1 - 0.2 * 0.0256), rel=1e-12)
    fixed = KLCoefficient(value=0.2)
    assert fixed.updated(float("nan"), 10**9) is fixed
    start = KLCoefficient(value=0.2, target=6.0, horizon=100)
    with pytest.raises(ValueError, match="the measured KL is NaN"):
        start.updated(float("nan"), 10)
    with pytest.raises(ValueError, match="500 samples at once against a KL horizon of 100"):
        start.updated(1.0, 500)


@pytest.mark.parametrize(("settings", "message"), [
    ({"value": -0.1}, "coefficient is -0.1"),
    ({"value": float("nan")}, "coefficient is nan"),
    ({"value": 0.1, "target": 0.0}, "target is 0.0"),
    ({"value": 0.0, "target": 6.0}, "coefficient is 0"),
    ({"value": 0.1, "target": 6.0, "horizon": 0}, "horizon is 0"),
])
def test_impossible_coefficients_are_errors(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KLCoefficient(**settings)

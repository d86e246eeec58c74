"""run.deterministic picks other kernels, not another gradient: on a CPU, where all add in one order, to the bit."""

from __future__ import annotations

import pytest
import torch

from tests.equality.rig import equal_by_name, open_rig, ragged_advantages


def both_ways(rank: int, world: int, family: str, parallel: tuple[str, ...]) -> tuple[bool, bool]:
    """Return whether gradients and weights after two steps are the same with run.deterministic and without."""
    found = []
    advantages = ragged_advantages(8)
    try:
        for asked in ("false", "true"):
            with open_rig(family, *parallel, f"run.deterministic={asked}", samples=8, total_steps=10) as rig:
                assert torch.are_deterministic_algorithms_enabled() == (asked == "true")
                rig.step(advantages, drops=True)
                rig.step(advantages, drops=True)
                found.append((rig.gradient(advantages, rig.plan(advantages, drops=True)), rig.weights()))
    finally:
        torch.use_deterministic_algorithms(False)
    (gradient, weights), (other_gradient, other_weights) = found
    return equal_by_name(gradient, other_gradient), equal_by_name(weights, other_weights)


@pytest.mark.parametrize(
    ("family", "world", "parallel"),
    [("qwen3", 1, ()), ("qwen2_tied", 2, ("parallel.tensor=2",)), ("qwen3_moe", 2, ("parallel.expert=2",))],
)
def test_the_gradient_is_that_of_a_run_without_it(pool, family, world, parallel):
    assert pool.run(world, both_ways, family, parallel, timeout_s=60) == [(True, True)] * world

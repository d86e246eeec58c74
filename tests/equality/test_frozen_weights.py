"""A frozen weight multiplies the gradient of all tokens at once, on every layout."""

from __future__ import annotations

import pytest
import torch

from tests.equality.adapter_rig import NUM_SAMPLES, TOPOLOGIES, open_adapted
from tests.equality.rig import ragged_advantages
from tests.pairwise import quick

from megatron.core.tensor_parallel.layers import LinearWithFrozenWeight  # isort: skip


def rows_apart(rank: int, world: int, family: str, parallel: tuple[str, ...], extra: tuple[str, ...]) -> list:
    """Return shape and strides of each gradient [T, 1, out] that a frozen weight would multiply row by row."""
    advantages, seen, apart = ragged_advantages(NUM_SAMPLES), [], []
    original = LinearWithFrozenWeight.backward

    def backward(ctx, gradient: torch.Tensor):
        seen.append(gradient.shape)
        if gradient.stride(0) != gradient.shape[1] * gradient.stride(1):  # torch.matmul folds [T, 1] only where equal
            apart.append((tuple(gradient.shape), gradient.stride()))
        return original(ctx, gradient)

    with pytest.MonkeyPatch.context() as patch, open_adapted(family, parallel, extra) as rig:
        patch.setattr(LinearWithFrozenWeight, "backward", staticmethod(backward))
        rig.gradient(advantages, rig.plan(advantages, drops=False))
    assert len(seen) > 4 * len(rig.model.model.layers) // rig.backend.topology.pipeline_size
    return apart


@pytest.mark.parametrize(
    "name", quick(["1 process", "recomputed", "TP2", "TP2-SP", "PP2-tied", "PP2-VPP2", "CP2", "EP2"], "PP2-tied", "CP2")
)
def test_frozen_weights_multiply_a_gradient_whole(pool, name):
    """With other strides than these a backward pass took ten times as long, and memory for a weight per token."""
    world, family, parallel, extra = TOPOLOGIES[name]
    assert pool.run(world, rows_apart, family, parallel, extra, timeout_s=90) == [[]] * world

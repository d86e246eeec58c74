"""A pipeline's cost model."""

from __future__ import annotations

from megatron_rl.planning.cost import CostModel, StageCost


def pipeline(stages: int, *, overhead: float = 256.0, square: float = 0.0, last: float = 1.0) -> CostModel:
    """Return a model of equal stages, the last one's tokens ``last`` times as dear."""
    inner, end = (StageCost(overhead=overhead, token=x, square=square) for x in (1.0, last))
    return CostModel(stages=(inner,) * (stages - 1) + (end,))

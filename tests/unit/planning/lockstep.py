"""The invariants of lockstep between data-parallel ranks."""

from __future__ import annotations

import numpy as np

from megatron_rl.planning.plan import PlanRules
from megatron_rl.types import StepPlan


def microbatches_of(plan: StepPlan, data_size: int) -> list[list[list[int]]]:
    """Return the micro-batches without fillers of each data-parallel rank, each as its samples.

    They are asserted to be what the ranks will iterate over.
    """
    per_rank = [[*plan.microbatches(rank)] for rank in range(data_size)]
    for rank, microbatches in enumerate(per_rank):
        assert plan.rank_samples(rank).tolist() == [i for m in microbatches for i in m.samples.tolist()]
        assert plan.num_microbatches[rank] == len(microbatches)
    return [[m.samples.tolist() for m in rank if not m.filler] for rank in per_rank]


def assert_lockstep(plan: StepPlan, rules: PlanRules, padded: np.ndarray) -> None:
    """Assert invariants 9 and 10 of planning/plan.py, block by block."""
    assert len(plan.filler_microbatches) == plan.num_microbatches.sum()
    ran = [i for rank in microbatches_of(plan, rules.data_size) for m in rank for i in m]
    silent, num_fillers = 0, 0
    for first in range(0, rules.data_size, rules.lockstep_ranks):
        block = [[*plan.microbatches(rank)] for rank in range(first, first + rules.lockstep_ranks)]
        most = max(sum(not m.filler for m in rank) for rank in block)
        count = next(c for c in range(most, most + rules.microbatch_multiple) if c % rules.microbatch_multiple == 0)
        assert [len(rank) for rank in block] == [count] * rules.lockstep_ranks  # 9
        silent += 0 if most else rules.lockstep_ranks
        for rank in block:  # 10
            true, fillers = [m for m in rank if not m.filler], [m for m in rank if m.filler]
            assert [m.filler for m in rank] == [False] * len(true) + [True] * len(fillers)
            assert all(
                len(m.samples) == 1 and m.samples[0] in ran and m.samples[0] not in plan.dropped for m in fillers
            )
            assert all(padded[m.samples[0]] == padded[ran].min() for m in fillers)
            if fillers and rules.samples_per_microbatch is None and (rules.repack or len(plan.dropped) == 0):
                assert all(len(m.samples) == 1 for m in true)
            num_fillers += len(fillers)
    assert plan.silent_ranks == (silent if ran else 0) and plan.num_fillers == num_fillers

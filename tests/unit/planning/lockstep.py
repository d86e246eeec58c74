"""Plans of one mini-batch, a pipeline's cost model, and the invariants of lockstep between data-parallel ranks."""

import numpy as np

from megatron_rl.planning.cost import CostModel, StageCost
from megatron_rl.planning.plan import PlanRules, plan_steps
from megatron_rl.types import StepPlan


def pipeline(stages: int, *, overhead: float = 256.0, square: float = 0.0, last: float = 1.0) -> CostModel:
    """Return a model of equal stages, the last one's tokens ``last`` times as dear."""
    inner, end = (StageCost(overhead=overhead, token=x, square=square) for x in (1.0, last))
    return CostModel(stages=(inner,) * (stages - 1) + (end,))


def one_step(lengths, rules: PlanRules, *, signal=None, drops: bool = True) -> StepPlan:
    """Return the plan of one mini-batch; all its samples have signal unless ``signal`` says which do."""
    count = len(lengths)
    signal = np.ones(count, dtype=bool) if signal is None else np.asarray(signal, dtype=bool)
    (one,) = plan_steps("train", [np.arange(count)], np.asarray(lengths), signal, rules, drops=drops).mini_batches
    return one


def microbatches_of(plan: StepPlan, data_size: int) -> list[list[list[int]]]:
    """Return each rank's micro-batches without fillers, as samples; assert that the ranks iterate over them."""
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
            among = ran if rules.repack else plan.members
            for sample, *others in (m.samples for m in fillers):
                assert not others and sample in among and padded[sample] == padded[among].min()
            assert plan.ran.tolist() == sorted(ran)
            if fillers and rules.samples_per_microbatch is None and (rules.repack or len(plan.dropped) == 0):
                assert all(len(m.samples) == 1 for m in true)
            num_fillers += len(fillers)
    assert plan.silent_ranks == (silent if ran else 0) and plan.num_fillers == num_fillers

"""Ranks that are about to run different things all find out before anything runs, and say who differs in what."""

import numpy as np
import pytest

from megatron_rl.errors import LockstepError
from megatron_rl.types import StepKind
from tests.equality.rig import open_rig, ragged_advantages


def disagree(rank: int, world: int, odd: int, what: str, pipeline: int) -> dict[str, object]:
    """Let rank ``odd`` alone have another plan, step kind or step index; then all agree again and step."""
    advantages = ragged_advantages(8)
    with open_rig("qwen2_tied", f"parallel.pipeline={pipeline}", samples=8) as rig:
        plan, mine = rig.plan(advantages, drops=True), advantages.copy()
        if rank == odd and what == "plan":
            mine[1] = 0.0  # it drops a sample that the others run
        elif rank == odd and what == "step kind":
            mine[:] = 0.0
        elif rank == odd:
            rig.backend.step_index += 1
        other = rig.backend.plan_training(rig.batch, mine != 0, drops=True)
        assert (other.mini_batches[0].kind is StepKind.GHOST) == (what == "step kind" and rank == odd)
        with pytest.raises(LockstepError) as caught:
            rig.accumulate(mine, other)
        rig.backend.step_index = 0
        rig.accumulate(advantages, plan)
        result = rig.backend.optim_step(plan.mini_batches[0].kind)
        return {"said": str(caught.value), "norm": result.grad_norm}


@pytest.mark.parametrize("what", ["plan", "step kind", "step index"])
@pytest.mark.parametrize(("pipeline", "data", "odd"),
                         [(1, 3, 0), pytest.param(1, 4, 2, marks=pytest.mark.long), (2, 2, 3)])
def test_every_rank_names_the_odd_one(pool, what, pipeline, data, odd):
    for rank, found in enumerate(pool.run(pipeline * data, disagree, odd, what, pipeline, timeout_s=30)):
        stage, replica = divmod(odd, data)
        assert f"{what}: rank {odd} (data-parallel {replica}, pipeline stage {stage}) has" in found["said"], found
        assert f"seen by rank {rank}" in found["said"]
        assert all(f"rank {peer} (" not in found["said"] for peer in range(pipeline * data) if peer != odd), found
        assert found["norm"] > 0  # and the backend goes on


def disagree_on_logprobs(rank: int, world: int) -> str:
    """Check the log-prob pass like a step: one rank chose other samples."""
    with open_rig("qwen2_tied", samples=8) as rig:
        signal = np.ones(8, dtype=bool)
        plan = rig.backend.plan_pass(rig.batch, signal)
        rig.batch = rig.backend.fetch_rows(rig.batch, plan)
        if rank == 1:
            signal[3] = False
            plan = rig.backend.plan_pass(rig.batch, signal)
        with pytest.raises(LockstepError) as caught:
            rig.backend.forward(rig.batch, plan)
        return str(caught.value)


def test_logprob_passes_are_checked(pool):
    for said in pool.run(3, disagree_on_logprobs, timeout_s=30):
        assert "plan: rank 1 (data-parallel 1, pipeline stage 0) has" in said

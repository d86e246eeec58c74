"""Makes the jobs of the simulator's tests."""

from __future__ import annotations

import numpy as np

from megatron_rl.config import load_config
from megatron_rl.model.hf_config import model_shape
from megatron_rl.planning.cost import CostModel, StageCost
from megatron_rl.simulator.degrees import degrees_of
from megatron_rl.simulator.forecast import Job
from megatron_rl.simulator.machine import Costs, machine_costs, stated_machine
from megatron_rl.simulator.workload import Workload
from tests.reference import tiny_config


def job_of(config, shape, degrees, workload: Workload, costs: Costs | None = None) -> Job:
    machine = stated_machine(1e12, shape, config, degrees)
    return Job(
        config=config,
        shape=shape,
        degrees=degrees,
        workload=workload,
        costs=costs or machine_costs(machine, shape, config, degrees, loss_share=0.8, source="stated"),
    )


def equal_samples(count: int, tokens: int, dead: int = 0) -> Workload:
    """Return groups of two samples of equal length, the first ``dead`` groups with equal rewards."""
    rewards = np.where(np.arange(count) // 2 < dead, 1.0, np.arange(count) % 2)
    return Workload(
        prompt_tokens=np.full(count, tokens // 4),
        response_tokens=np.full(count, tokens - tokens // 4),
        loss_tokens=np.full(count, tokens - tokens // 4),
        rewards=rewards,
        groups=np.arange(count) // 2,
    )


def tiny_job(workload: Workload, world: int, *overrides: str, costs: Costs | None = None, family: str = "qwen3") -> Job:
    config = load_config(None, ["model.dtype=float32", "plan.max_tokens_per_microbatch=40", *overrides])
    degrees = degrees_of(config, world)
    shape = model_shape(tiny_config(family, layers=8), config, degrees, layer_spec="torch")
    return job_of(config, shape, degrees, workload, costs)


def per_token(stages: int, virtual: int = 1) -> Costs:
    """Return costs of one second a token on every stage, a third of it forward, and of 7 s for an optimizer step."""
    model = CostModel(stages=(StageCost(overhead=0.0, token=1.0, square=0.0),) * stages, virtual=virtual)
    return Costs(model=model, forward_share=1 / 3, optimizer_s=7.0, source="test")

"""Makes the jobs of the simulator's tests, and names settings of layouts."""

from collections.abc import Iterable

import numpy as np
import torch

from megatron_rl.config import load_config
from megatron_rl.model.hf_config import model_shape
from megatron_rl.model.settings import ModelSettings
from megatron_rl.planning.cost import CostModel, StageCost
from megatron_rl.simulator.degrees import degrees_of
from megatron_rl.simulator.forecast import Job
from megatron_rl.simulator.machine import Costs, machine_costs, stated_machine
from megatron_rl.simulator.placed import PlacedModel
from megatron_rl.simulator.workload import Workload
from tests.reference import tiny_config

SP = ("parallel.tensor=2", "parallel.sequence_parallel=true")
OVERLAPS = ("overlap_grad_reduce=true", "overlap_param_gather=true", "bucket_size=1000")
OVERLAPS = tuple(f"megatron.ddp.{setting}" for setting in OVERLAPS)


def job_of(config, shape, degrees, workload: Workload, costs: Costs | None = None) -> Job:
    placed = PlacedModel.of(config, shape, degrees)
    machine = stated_machine(1e12, placed, config.plan.microbatch_overhead_tokens)
    costs = costs or machine_costs(machine, placed, loss_share=0.8, source="stated")
    return Job(config=config, shape=shape, degrees=degrees, workload=workload, costs=costs)


def equal_samples(count: int, tokens: int, dead: int = 0) -> Workload:
    """Return groups of two samples of equal length, the first ``dead`` groups with equal rewards."""
    groups = np.arange(count) // 2
    rewards, prompt = np.where(groups < dead, 1.0, np.arange(count) % 2), np.full(count, tokens // 4)
    lengths = dict(prompt_tokens=prompt, response_tokens=tokens - prompt, loss_tokens=tokens - prompt)
    return Workload(rewards=rewards, groups=groups, **lengths)


def tiny_job(workload: Workload, world: int, *overrides: str, costs: Costs | None = None, family: str = "qwen3") -> Job:
    config = load_config(None, ["model.dtype=float32", "plan.max_tokens_per_microbatch=40", *overrides])
    degrees = degrees_of(config.parallel, world)
    shape = model_shape(tiny_config(family, layers=8), ModelSettings.of(config), degrees, layer_spec="torch")
    return job_of(config, shape, degrees, workload, costs)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def held_bytes(built) -> tuple[int, int, int]:
    """Return the bytes of weights, gradients and moments that a backend or a critic holds after a step."""
    weights = [p for chunk in built.chunks for p in chunk.parameters()]
    states = [x for part in built.optimizer.megatron.chained_optimizers for x in part.optimizer.state.values()]
    kinds = ("exp_avg", "exp_avg_sq", "momentum_buffer")
    moments = bytes_of(state[name] for state in states for name in kinds if name in state)
    return bytes_of(weights), sum(p.main_grad.numel() * 4 for p in weights if p.requires_grad), moments


def per_token(stages: int, virtual: int = 1) -> Costs:
    """Return costs of one second a token on every stage, a third of it forward, and of 7 s for an optimizer step."""
    model = CostModel(stages=(StageCost(overhead=0.0, token=1.0, square=0.0),) * stages, virtual=virtual)
    return Costs(model=model, forward_share=1 / 3, optimizer_s=7.0, source="test",
                 chunk_shares=(1 / model.virtual,) * len(model.stages) * model.virtual)

"""The degrees of parallelism of a topology, as numbers alone, without ranks or process groups."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.model import ParallelConfig
from megatron_rl.distributed.topology import check_degrees


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Holds the sizes of a topology's process groups, each in a field named as in Topology (distributed/topology.py).

    virtual_size: the number of model chunks of each pipeline rank.

    Example: 16 GPUs with TP=2 and PP=2 leave ``data_size=4``.
    """

    world_size: int
    tensor_size: int
    pipeline_size: int
    virtual_size: int
    context_size: int
    data_size: int
    expert_size: int
    expert_tensor_size: int

    @property
    def lockstep_replicas(self) -> int:
        """Return the number of data-parallel replicas that share experts, and so run equally many micro-batches."""
        return max(1, self.expert_size * self.expert_tensor_size // (self.tensor_size * self.context_size))

    @property
    def expert_data_size(self) -> int:
        """Return the number of ranks that hold the same experts, over which their gradients are summed."""
        return self.world_size // (self.expert_size * self.expert_tensor_size * self.pipeline_size)

    @property
    def named(self) -> str:
        """Return the sizes as text for tables: TP, PP and DP always, and VPP, CP and EP if above 1."""
        rarer = (("VPP", self.virtual_size), ("CP", self.context_size), ("EP", self.expert_size))
        always = f"TP {self.tensor_size}, PP {self.pipeline_size}, DP {self.data_size}"
        return ", ".join([always, *(f"{name} {size}" for name, size in rarer if size > 1)])


def degrees_of(parallel: ParallelConfig, world_size: int) -> Degrees:
    """Return the sizes of the process groups of a configuration on ``world_size`` GPUs.

    Raises ConfigError, as a run would, if the degrees of parallelism do not divide ``world_size`` or
    one another.
    """
    expert_tensor = parallel.expert_tensor or parallel.tensor
    check_degrees(world_size, parallel.tensor, parallel.context, parallel.pipeline, parallel.expert, expert_tensor)
    return Degrees(
        world_size=world_size,
        tensor_size=parallel.tensor,
        pipeline_size=parallel.pipeline,
        virtual_size=parallel.virtual_pipeline,
        context_size=parallel.context,
        data_size=world_size // (parallel.tensor * parallel.context * parallel.pipeline),
        expert_size=parallel.expert,
        expert_tensor_size=expert_tensor,
    )

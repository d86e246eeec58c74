"""This process's ranks and process groups. No other module imports Megatron-Core's parallel_state."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.config import ParallelConfig
from megatron_rl.distributed.collectives import await_all_ranks, open_host_group
from megatron_rl.distributed.lost_rank import group_timeout, joining
from megatron_rl.distributed.platform import HOST
from megatron_rl.errors import ConfigError

from megatron.core import parallel_state  # isort: skip  (after platform)
from megatron.core.tensor_parallel import random as tensor_parallel_random  # isort: skip

ALONE = ParallelConfig()  # one process


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Holds this process's ranks and groups. Sizes are degrees of parallelism; ranks count from 0 in their group.

    data_group: the ranks that hold this rank's shard, one in each replica of the model, all with
        this rank's context rank. ``data_size`` is the number of replicas.
    expert_group: the ``expert_size`` × ``expert_tensor_size`` ranks that together hold all experts
        of a layer. The ranks of one ``expert_tensor_group`` are consecutive in it.
    expert_tensor_group: the ranks that share one expert's matrices.
    expert_data_rank: this rank's number among the ranks that hold the same shard of the same
        experts.
    model_group: the ranks of this replica with this rank's context rank: all tensor ranks of all
        pipeline stages.

    Example: world 4, TP=1, PP=2, DP=2: global ranks 0, 1 are stage 0 of replicas 0, 1; ranks 2, 3
    are stage 1.
    """

    rank: int
    world_size: int
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    virtual_size: int
    data_rank: int
    data_size: int
    context_rank: int
    context_size: int
    expert_rank: int
    expert_size: int
    expert_tensor_rank: int
    expert_tensor_size: int
    expert_data_rank: int
    tensor_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    context_group: dist.ProcessGroup
    expert_group: dist.ProcessGroup
    expert_tensor_group: dist.ProcessGroup
    model_group: dist.ProcessGroup

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def is_main(self) -> bool:
        """Return whether this rank writes files and draws the progress bar."""
        return self.rank == 0

    @property
    def reports_loss(self) -> bool:
        """Return whether this rank's losses count: it is in the last stage and the first tensor rank.

        Each context rank reports the losses of its own tokens; they add up to the replica's loss.
        """
        return self.is_last_stage and self.tensor_rank == 0

    @property
    def degrees(self) -> str:
        """Return the degrees for logs and tables: TP, PP and DP always, the others if they are above 1."""
        named = [f"TP {self.tensor_size}", f"PP {self.pipeline_size}", f"DP {self.data_size}"]
        rarer = (("VPP", self.virtual_size), ("CP", self.context_size), ("EP", self.expert_size))
        return ", ".join(named + [f"{name} {size}" for name, size in rarer if size > 1])

    @property
    def lockstep_replicas(self) -> int:
        """Return over how many neighbouring replicas the experts are split; these join the same all-to-alls."""
        return max(1, self.expert_size * self.expert_tensor_size // (self.tensor_size * self.context_size))

    def data_rank_of(self, rank: int) -> int:
        """Return a global rank's data-parallel rank in Megatron's default order of ranks.

        In that order tensor ranks vary fastest, then context, expert, data and pipeline ranks.
        """
        return (rank // (self.tensor_size * self.context_size)) % self.data_size

    def pipeline_rank_of(self, rank: int) -> int:
        return rank // (self.tensor_size * self.context_size * self.data_size)

    def who(self, rank: int) -> str:
        """Return a rank's name for messages: "rank 3 (data-parallel 1, pipeline stage 0, tensor rank 1)"."""
        coordinates = [f"data-parallel {self.data_rank_of(rank)}", f"pipeline stage {self.pipeline_rank_of(rank)}"]
        if self.tensor_size > 1:
            coordinates.append(f"tensor rank {rank % self.tensor_size}")
        if self.context_size > 1:
            coordinates.append(f"context rank {rank // self.tensor_size % self.context_size}")
        return f"rank {rank} ({', '.join(coordinates)})"


def initialize(
    parallel: ParallelConfig = ALONE,
    *,
    deadline_s: float = 1800.0,
    seed: int = 0,
    init_method: str | None = None,
) -> Topology:
    """Join the default process group if this process has not done so, and build Megatron-Core's groups.

    parallel: the degrees of parallelism.
    deadline_s: the time-out of every group, in seconds.
    seed: the seed of Megatron-Core's random generators on a GPU.
    init_method: the address for torch's rendezvous; None takes the launcher's variables.

    Raises ConfigError if the degrees do not fit the number of ranks, PeerError if the ranks do not
    meet.
    """
    if not dist.is_initialized():
        _make_world(init_method, deadline_s)
    if HOST.is_cuda:
        torch.cuda.set_device(HOST.device)
    open_host_group(deadline_s)
    expert_tensor, virtual_pipeline = parallel.expert_tensor or parallel.tensor, parallel.virtual_pipeline
    check_degrees(
        dist.get_world_size(),
        parallel.tensor,
        parallel.context,
        parallel.pipeline,
        parallel.expert,
        expert_tensor,
    )
    # Megatron-Core's groups ignore init_process_group's time-out; their own default is 30 minutes.
    with joining(HOST.backend, deadline_s):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=virtual_pipeline if virtual_pipeline > 1 else None,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=expert_tensor,
            distributed_timeout_minutes=group_timeout(HOST.backend, deadline_s).total_seconds() / 60,
        )
        await_all_ranks()
    # A CPU has no CUDA generators, so its tracker's forks do nothing. model/seam_fields.py refuses dropout there.
    if HOST.is_cuda:
        tensor_parallel_random.model_parallel_cuda_manual_seed(seed)
    else:
        tensor_parallel_random.initialize_rng_tracker(inference_rng_tracker=True)
        # Activation recomputation would save and restore a CUDA generator's state (0.16.1
        # ``tensor_parallel/random.py:444``).
        tensor_parallel_random._get_cuda_rng_state = lambda *args, **kwargs: None
        tensor_parallel_random._set_cuda_rng_state = lambda *args, **kwargs: None
    return current()


def _make_world(init_method: str | None, deadline_s: float) -> None:
    """Make the default process group of all ranks. Without a launcher it holds this process alone.

    init_method: the address for torch's rendezvous; None takes the launcher's variables.
    deadline_s: the group's time-out in seconds.
    """
    if "RANK" not in os.environ and init_method is None:
        dist.init_process_group(
            HOST.backend,
            init_method="tcp://127.0.0.1:0",
            rank=0,
            world_size=1,
            timeout=group_timeout(HOST.backend, deadline_s),
        )
        return
    from megatron_rl.distributed.rendezvous import join_world, meet

    store, rank, world_size = meet(deadline_s, init_method or "env://")
    join_world(HOST.backend, dist.PrefixStore("world", store), rank, world_size, deadline_s)


def _record() -> dict[str, object]:
    """Return {name: value} of the variables in which Megatron-Core's parallel_state keeps its process groups.

    In megatron-core 0.16.1 and 0.19.2 they are the module's globals that begin with one underscore.
    """
    code = (types.FunctionType, types.ModuleType, type)
    return {
        name: value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and not name.startswith("__") and not isinstance(value, code)
    }


def _no_grid() -> dict[str, object]:
    """Return {name: value} of parallel_state's variables as they are before any groups exist.

    Each value is None or an empty dictionary (megatron-core 0.16.1 and 0.19.2).
    """
    return {name: {} if isinstance(value, dict) else None for name, value in _record().items()}


@contextlib.contextmanager
def undone_on_failure() -> Iterator[None]:
    """Return a context that undoes what ``initialize`` did within it, if its block raises. Not a collective.

    New process groups are destroyed, and parallel_state's variables get their values from before. A
    default process group that existed before stays.
    """
    had_world = dist.is_initialized()
    record = {name: value.copy() if isinstance(value, dict | list) else value for name, value in _record().items()}
    groups = set(dist.distributed_c10d._world.pg_map)
    try:
        yield
    except BaseException:
        vars(parallel_state).update(record)
        if dist.is_initialized() and had_world:
            for group in set(dist.distributed_c10d._world.pg_map) - groups:
                dist.destroy_process_group(group)
        elif dist.is_initialized():
            dist.destroy_process_group()
        raise


class Grid:
    """Keeps a second set of Megatron-Core's process groups over the same ranks, with other degrees of parallelism."""

    def __init__(self) -> None:
        self._own = _no_grid()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Return a context within which Megatron-Core uses this set of process groups. Not a collective.

        In the first such context call ``initialize``, which builds the groups. Later contexts switch
        to the same groups.
        """
        outer = _record()
        vars(parallel_state).update(self._own)
        try:
            yield
        finally:
            self._own = _record()
            vars(parallel_state).update(outer)


def check_degrees(world: int, tensor: int, context: int, pipeline: int, expert: int, expert_tensor: int) -> None:
    """Raise ConfigError if the degrees of parallelism do not fit ``world``, the number of ranks.

    tensor · context · pipeline and expert · expert_tensor · pipeline must each divide ``world``. Of
    tensor · context and expert · expert_tensor one must divide the other.
    """
    dense, sparse = tensor * context, expert * expert_tensor
    if world % (dense * pipeline):
        names = f"parallel.tensor={tensor} x parallel.context={context} x parallel.pipeline={pipeline}"
        raise ConfigError(
            f"world size {world} is no multiple of {names} = {dense * pipeline}; start {dense * pipeline} processes "
            "or a multiple, or lower one of them"
        )
    if world % (sparse * pipeline):
        names = f"parallel.expert={expert} x parallel.expert_tensor={expert_tensor} x parallel.pipeline={pipeline}"
        raise ConfigError(
            f"world size {world} is no multiple of {names} = {sparse * pipeline}; start {sparse * pipeline} processes "
            "or a multiple, or lower one of them (parallel.expert_tensor is parallel.tensor unless set)"
        )
    if sparse % dense and dense % sparse:
        raise ConfigError(
            f"parallel.expert={expert} x parallel.expert_tensor={expert_tensor} = {sparse} and "
            f"parallel.tensor={tensor} x parallel.context={context} = {dense}: one must divide the other, or experts "
            "straddle replicas; change parallel.expert"
        )


def current() -> Topology:
    """Return the Topology of the process groups that Megatron-Core's parallel_state holds now."""
    return Topology(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_size=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
        context_size=parallel_state.get_context_parallel_world_size(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_rank=parallel_state.get_expert_tensor_parallel_rank(),
        expert_tensor_size=parallel_state.get_expert_tensor_parallel_world_size(),
        expert_data_rank=parallel_state.get_expert_data_parallel_rank(),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
        data_group=parallel_state.get_data_parallel_group(),
        context_group=parallel_state.get_context_parallel_group(),
        expert_group=parallel_state.get_expert_tensor_and_model_parallel_group(),
        expert_tensor_group=parallel_state.get_expert_tensor_parallel_group(),
        model_group=parallel_state.get_model_parallel_group(),
    )


def destroy(*, leave_world: bool = False) -> None:
    """Destroy Megatron-Core's groups one by one. With ``leave_world`` destroy the default process group too.

    ``destroy_model_parallel`` alone leaks 84 file descriptors and 51 threads per call.
    """
    world = dist.distributed_c10d._get_default_group()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not world:
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    if leave_world:
        dist.destroy_process_group()

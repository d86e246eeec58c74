"""Values of the host travel by gloo beside NCCL, and equal what every rank holds."""

from __future__ import annotations

import datetime
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.backend.schedule import check_lockstep
from megatron_rl.distributed import collectives
from megatron_rl.errors import PeerError
from megatron_rl.types import StepKind

NAMES = ("all_reduce", "broadcast", "all_gather_into_tensor")


def beside_another_backend(rank: int, world: int) -> dict[str, object]:
    """Call each collective in a world that says it is NCCL's, and record the groups that the calls name."""
    groups: list[dist.ProcessGroup | None] = []

    def recording(function):
        def call(*args, group=None, **kwargs):
            groups.append(group)
            assert all(x.device.type == "cpu" for x in args if isinstance(x, torch.Tensor))
            return function(*args, group=group, **kwargs)

        return call

    with patch.object(dist, "get_backend", lambda *_: "nccl"):
        collectives.open_host_group(30.0)
        host = collectives.host_group()
        collectives.open_host_group(30.0)  # a second grid of the same world makes no second group
        same = collectives.host_group() is host
        with patch.multiple(dist, **{name: recording(getattr(dist, name)) for name in NAMES}):
            found = {
                "json": collectives.gather_json({"rank": rank, "text": "x" * rank}),
                "sum": collectives.reduce_on_host(torch.tensor([rank, 1])).tolist(),
                "max": collectives.reduce_on_host(torch.tensor([float(rank)]), dist.ReduceOp.MAX).item(),
                "array": collectives.broadcast_from_rank0(np.array([0.1, float(rank)])).tolist(),
            }
            check_lockstep(3, StepKind.REAL, b"plan", None)
            try:
                collectives.raise_on_all_ranks(ValueError("planted") if rank == 1 else None)
            except (ValueError, PeerError) as error:
                found["raised"] = str(error)
    timeout = host._get_backend(torch.device("cpu")).options._timeout
    dist.destroy_process_group(host)
    is_host = [group is host for group in groups]
    return {**found, "same": same, "calls": len(groups), "host": all(is_host), "timeout": timeout}


def test_values_of_the_host_travel_in_a_group_of_their_own(pool):
    for rank, found in enumerate(pool.run(3, beside_another_backend, timeout_s=60)):
        assert found["json"] == [{"rank": r, "text": "x" * r} for r in range(3)]
        assert found["sum"] == [3, 3] and found["max"] == 2.0 and found["array"] == [0.1, 0.0]
        assert found["raised"] == ("planted" if rank == 1 else "rank 1 stopped with ValueError: planted")
        assert found["same"] and found["host"] and found["calls"] == 8
        assert found["timeout"] == datetime.timedelta(seconds=30)


def in_a_gloo_world(rank: int, world: int) -> tuple[bool, int]:
    before = len(dist.distributed_c10d._world.pg_map)
    collectives.open_host_group(30.0)
    return collectives.host_group() is None, len(dist.distributed_c10d._world.pg_map) - before


def test_a_gloo_world_needs_no_second_group(pool):
    assert pool.run(2, in_a_gloo_world, timeout_s=30) == [(True, 0)] * 2

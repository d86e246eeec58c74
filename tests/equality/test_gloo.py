"""megatron_rl's own collectives on the CPU, which stand in gloo's place, equal a naive loop."""

import datetime
import pathlib
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

import megatron_rl.distributed.platform  # noqa: F401 (replaces the manager, and gives groups their device)
from megatron_rl.backend.schedule import check_lockstep
from megatron_rl.distributed import collectives
from megatron_rl.errors import PeerError
from megatron_rl.types import StepKind

SIZES = 8, 640, 12_544, 31, 4096
GROUPS = 8
ROUNDS = 60  # asynchronous and not, by turns; gloo's own coalesced all-gather corrupts the heap in one of 3000
NAMES = ("all_reduce", "broadcast", "all_gather_into_tensor")


def collectives_together(rank: int, world: int) -> list[bool]:
    """Gather, sum and scatter whole buckets under the manager, asynchronously and not; compare with what ranks hold."""
    manager = dist._coalescing_manager
    equal = []
    for turn in range(ROUNDS):
        asynchronous = turn % 2 == 0
        shards = [[torch.full((size,), float(r * turn + size)) for r in range(world)] for size in SIZES]
        gathered, summed = [torch.zeros(world * size) for size in SIZES], [of[rank].clone() for of in shards]
        whole, scattered = [torch.cat(of) * (rank + 1) for of in shards], [torch.zeros(size) for size in SIZES]
        handles = []
        for issue in (
            lambda i: dist.all_gather_into_tensor(gathered[i], shards[i][rank], async_op=asynchronous),  # noqa: B023
            lambda i: dist.all_reduce(summed[i], async_op=asynchronous),  # noqa: B023
            lambda i: dist.reduce_scatter_tensor(scattered[i], whole[i], async_op=asynchronous),  # noqa: B023
        ):
            with manager(dist.group.WORLD, async_ops=asynchronous) as handle:
                for i in range(len(SIZES)):
                    issue(i)
            handles.append(handle)
        for handle in handles if asynchronous else ():
            handle.wait()
        factor = sum(range(1, world + 1))
        equal += [torch.equal(a, torch.cat(b)) for a, b in zip(gathered, shards, strict=True)]
        equal += [torch.equal(a, torch.stack(b).sum(0)) for a, b in zip(summed, shards, strict=True)]
        equal += [torch.equal(a, b[rank] * factor) for a, b in zip(scattered, shards, strict=True)]
    return equal


def test_coalesced_collectives_equal_the_single_ones(pool):
    for equal in pool.run(2, collectives_together, timeout_s=60):
        assert len(equal) == 3 * len(SIZES) * ROUNDS and all(equal)


def groups_on_one_device(rank: int, world: int) -> tuple[int, list[float]]:
    """Sum over groups of the same ranks, which one rank starts in the order of the groups and the other against it."""
    groups = [dist.new_group() for _ in range(GROUPS)]
    given = [torch.full((SIZES[1],), float(10 * index + rank)) for index in range(GROUPS)]
    order = range(GROUPS) if rank == 0 else reversed(range(GROUPS))
    for work in [dist.all_reduce(given[index], group=groups[index], async_op=True) for index in order]:
        work.wait()
    assert all((x == x[0]).all() for x in given)
    loops = [path
             for path in pathlib.Path("/proc/self/task").glob("*/comm") if path.read_text().strip() == "gloo_tcp_loop"]
    return len(loops), [float(x[0]) for x in given]


def test_groups_share_a_device_and_nothing_else(pool):
    """One thread serves all groups; torch's own way is one for each, which wakes a hundred times a second."""
    for loops, sums in pool.run(2, groups_on_one_device, timeout_s=60):
        assert loops == 1 and sums == [20.0 * index + 1.0 for index in range(GROUPS)]


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
            found = {"json": collectives.gather_json({"rank": rank, "text": "x" * rank}),
                     "sum": collectives.reduce_on_host(torch.tensor([rank, 1])).tolist(),
                     "max": collectives.reduce_on_host(torch.tensor([float(rank)]), dist.ReduceOp.MAX).item(),
                     "array": collectives.broadcast_from_rank0(np.array([0.1, float(rank)])).tolist()}
            check_lockstep(3, StepKind.REAL, b"plan", None)
            try:
                collectives.raise_on_all_ranks(ValueError("planted") if rank == 1 else None)
            except (ValueError, PeerError) as error:
                found["raised"] = (type(error), str(error))
    timeout = host._get_backend(torch.device("cpu")).options._timeout
    dist.destroy_process_group(host)
    is_host = [group is host for group in groups]
    return {**found, "same": same, "calls": len(groups), "host": all(is_host), "timeout": timeout}


def test_values_of_the_host_travel_in_a_group_of_their_own(pool):
    for rank, found in enumerate(pool.run(3, beside_another_backend, timeout_s=60)):
        assert found["json"] == [{"rank": r, "text": "x" * r} for r in range(3)]
        assert found["sum"] == [3, 3] and found["max"] == 2.0 and found["array"] == [0.1, 0.0]
        of_a_peer = (PeerError, "rank 1 stopped with ValueError: planted")
        assert found["raised"] == ((ValueError, "planted") if rank == 1 else of_a_peer)
        assert found["same"] and found["host"] and found["calls"] == 8
        assert found["timeout"] == datetime.timedelta(seconds=30)


def in_a_gloo_world(rank: int, world: int) -> tuple[bool, int]:
    before = len(dist.distributed_c10d._world.pg_map)
    collectives.open_host_group(30.0)
    return collectives.host_group() is None, len(dist.distributed_c10d._world.pg_map) - before


def test_a_gloo_world_needs_no_second_group(pool):
    assert pool.run(2, in_a_gloo_world, timeout_s=30) == [(True, 0)] * 2

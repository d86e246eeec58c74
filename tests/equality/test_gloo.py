"""megatron_rl's own collectives on the CPU, which stand in gloo's place, equal a naive loop."""

from __future__ import annotations

import pathlib

import torch
import torch.distributed as dist

import megatron_rl.distributed.platform  # noqa: F401 (replaces the manager, and gives groups their device)

SIZES = 8, 640, 12_544, 31, 4096
GROUPS = 8
ROUNDS = 300  # gloo's own coalesced all-gather corrupts the heap about once in 3000 rounds


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
    loops = [
        path for path in pathlib.Path("/proc/self/task").glob("*/comm") if path.read_text().strip() == "gloo_tcp_loop"
    ]
    return len(loops), [float(x[0]) for x in given]


def test_groups_share_a_device_and_nothing_else(pool):
    """One thread serves all groups; torch's own way is one for each, which wakes a hundred times a second."""
    for loops, sums in pool.run(2, groups_on_one_device, timeout_s=60):
        assert loops == 1 and sums == [20.0 * index + 1.0 for index in range(GROUPS)]

"""Compares every collective that the package uses with its definition, over this host's backend.

    torchrun --nproc_per_node 2 tools/gpu_report_steps/collectives.py --json collectives.json --share-gpu

With --share-gpu the ranks meet over NCCL's sockets on one GPU. A collective that hangs ends at --deadline, and the
process with it: the file then holds what came before.
"""

from __future__ import annotations

import argparse
import datetime
import os
import pathlib
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))


def gather_bytes(rank: int, world: int, device: torch.device) -> bool:
    found = torch.empty(world * 5, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(found, torch.full((5,), rank + 1, dtype=torch.uint8, device=device))
    return found.tolist() == [r + 1 for r in range(world) for _ in range(5)]


def gather_counts(rank: int, world: int, device: torch.device) -> bool:
    found = torch.empty(world, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(found, torch.tensor([2**40 + rank], device=device))
    return found.tolist() == [2**40 + r for r in range(world)]


def reduce_all(kind: dist.ReduceOp, dtype: torch.dtype, wanted: Callable[[int], float]) -> Callable[..., bool]:
    def check(rank: int, world: int, device: torch.device) -> bool:
        found = torch.tensor([rank + 1], dtype=dtype, device=device)
        dist.all_reduce(found, op=kind)
        return found.item() == wanted(world)

    return check


def uneven_all_to_all(rank: int, world: int, device: torch.device) -> bool:
    """Rank r sends r + d + 1 numbers to rank d."""
    sent = torch.cat([torch.full((rank + d + 1,), 10.0 * rank + d, device=device) for d in range(world)])
    sizes = [rank + d + 1 for d in range(world)]
    found = torch.empty(sum(sizes), device=device)
    dist.all_to_all_single(found, sent, sizes, sizes)
    return found.tolist() == [10.0 * s + rank for s in range(world) for _ in range(s + rank + 1)]


def uneven_gather(rank: int, world: int, device: torch.device) -> bool:
    parts = [torch.empty(r + 1, device=device) for r in range(world)]
    dist.all_gather(parts, torch.full((rank + 1,), float(rank), device=device))
    return [x.tolist() for x in parts] == [[float(r)] * (r + 1) for r in range(world)]


def scatter_sum(rank: int, world: int, device: torch.device) -> bool:
    found = torch.empty(3, device=device)
    dist.reduce_scatter_tensor(found, torch.arange(3.0 * world, device=device))
    return found.tolist() == [world * (3.0 * rank + i) for i in range(3)]


def reduce_to_first(rank: int, world: int, device: torch.device) -> bool:
    found = torch.full((4,), float(rank + 1), device=device)
    dist.reduce(found, 0)
    return rank != 0 or found.tolist() == [world * (world + 1) / 2] * 4


def broadcasts_under_way(rank: int, world: int, device: torch.device) -> bool:
    tensors = [torch.full((1000,), float(i if rank == i % world else -1), device=device) for i in range(4)]
    for work in [dist.broadcast(x, i % world, async_op=True) for i, x in enumerate(tensors)]:
        work.wait()
    return all(x.eq(i).all().item() for i, x in enumerate(tensors))


def both_ways(rank: int, world: int, device: torch.device) -> bool:
    after, before = (rank + 1) % world, (rank - 1) % world
    found = torch.empty(1000, device=device)
    calls = [dist.P2POp(dist.isend, torch.full((1000,), float(rank), device=device), after)]
    calls.append(dist.P2POp(dist.irecv, found, before))
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return found.eq(before).all().item()


def objects(rank: int, world: int, device: torch.device) -> bool:
    found: list = [None] * world
    dist.all_gather_object(found, {"rank": rank})
    return [x["rank"] for x in found] == list(range(world))


def groups_of_one_and_all(rank: int, world: int, device: torch.device) -> bool:
    found = torch.ones(1, device=device)
    own = [dist.new_group([r]) for r in range(world)][rank]
    dist.all_reduce(found, group=own)
    dist.barrier()
    return found.item() == 1.0


CHECKS: dict[str, Callable[[int, int, torch.device], bool]] = {
    "all_gather_into_tensor uint8": gather_bytes,
    "all_gather_into_tensor int64": gather_counts,
    "all_reduce float64 sum": reduce_all(dist.ReduceOp.SUM, torch.float64, lambda n: n * (n + 1) / 2),
    "all_reduce int64 min": reduce_all(dist.ReduceOp.MIN, torch.int64, lambda n: 1),
    "all_reduce int32 max": reduce_all(dist.ReduceOp.MAX, torch.int32, lambda n: n),
    "all_reduce bfloat16 sum": reduce_all(dist.ReduceOp.SUM, torch.bfloat16, lambda n: n * (n + 1) / 2),
    "all_to_all_single uneven": uneven_all_to_all,
    "all_gather uneven": uneven_gather,
    "reduce_scatter_tensor": scatter_sum,
    "reduce": reduce_to_first,
    "broadcast, four under way": broadcasts_under_way,
    "batch_isend_irecv both ways": both_ways,
    "all_gather_object": objects,
    "groups of one, barrier": groups_of_one_and_all,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: torchrun --nproc_per_node 2 tools/gpu_report_steps/collectives.py --json collectives.json",
    )
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--share-gpu", action="store_true", help="several ranks on one GPU, over NCCL's sockets")
    parser.add_argument("--deadline", type=float, default=30.0, metavar="S", help="of one collective (default 30)")
    given = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("RANK is not set: start it by torchrun --nproc_per_node 2 tools/gpu_report_steps/collectives.py …")
    if given.share_gpu:
        from acceptance_matrix.shared_gpu import share

        share()
    from clock import write

    from megatron_rl.distributed.platform import HOST  # gloo's uneven lists come with it

    device = HOST.device
    if HOST.is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(HOST.backend, timeout=datetime.timedelta(seconds=given.deadline))
    rank, world, rows = dist.get_rank(), dist.get_world_size(), []
    for name, check in CHECKS.items():
        started, why = time.perf_counter(), ""
        try:
            right = check(rank, world, device)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            right, why = False, f"{type(error).__name__}: {error}".splitlines()[0]
        rows.append({"name": name, "right": bool(right), "why": why, "seconds": time.perf_counter() - started})
        wrong = [f"{x['name']} {x['why']}".strip() for x in rows if not x["right"]]
        if rank == 0:
            says = [f"{len(rows) - len(wrong)} of {len(CHECKS)} right over {HOST.backend}, {world} ranks", *wrong]
            found = {"headline": says, "backend": HOST.backend, "checks": rows, "failed": "; ".join(wrong)}
            code = write(given.json, found)
    dist.barrier()
    dist.destroy_process_group()
    return code if rank == 0 else 0


if __name__ == "__main__":
    raise SystemExit(main())

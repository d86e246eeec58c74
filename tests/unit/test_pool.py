"""Checks the pool of gloo workers: order, failures that name their ranks, bounds in time, nothing leaked."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from tests.patience import patient
from tests.workers.pool import LOADED, Pool, PoolError

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def fragile() -> Iterator[Pool]:
    """Start a pool to break, so that the session's keeps its imports."""
    with Pool(max_world=2, grace_s=1.0) as workers:
        yield workers


def sum_of_ranks(rank: int, world: int, offset: int, *, scale: int = 1) -> tuple[int, object]:
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(rank + offset)])
    dist.all_reduce(total)
    return rank, total * scale


def describe(rank: int, world: int) -> dict[str, object]:
    import torch

    inherited = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "SLURM_PROCID"} & os.environ.keys()
    return {"pid": os.getpid(), "threads": torch.get_num_threads(), "inherited": inherited}


def raise_on(rank: int, world: int, bad: tuple[int, ...]) -> None:
    import torch.distributed as dist

    print(f"about to fail, says rank {rank}")
    if rank in bad:
        raise ValueError(f"planted on {rank}")
    dist.barrier()


def hang(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(3600)


def die(rank: int, world: int) -> None:
    import torch.distributed as dist

    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leave_by_exit(rank: int, world: int) -> None:
    sys.exit(3)


def unpicklable(rank: int, world: int) -> object:
    return lambda: None


def initialise_megatron(rank: int, world: int) -> tuple[int, int]:
    """Return the numbers of open file descriptors and threads with Megatron's groups up."""
    import torch
    import torch.distributed as dist

    from megatron_rl.distributed import platform  # noqa: F401  (first: Megatron-Core then looks for no CUDA)

    from megatron.core import parallel_state  # isort: skip

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    dist.all_reduce(torch.ones(1), group=parallel_state.get_tensor_model_parallel_group())
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_results_in_rank_order(pool: Pool) -> None:
    results = pool.run(2, sum_of_ranks, 10, scale=2)
    assert [rank for rank, _ in results] == [0, 1]
    assert [total.item() for _, total in results] == [42.0, 42.0]  # (10 + 11) · 2


def test_launcher_variables_do_not_reach_a_worker_which_close_ends_and_one_that_was_spoiled_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_PROCID"):
        monkeypatch.setenv(name, "7")
    with Pool(max_world=1) as fresh:
        pids = [fresh.run(1, describe, spoils=spoils)[0]["pid"] for spoils in (False, True, False)]
        (found,) = fresh.run(1, describe)
    assert pids[0] == pids[1] != pids[2] == found["pid"]
    assert found["threads"] == 1 and not found["inherited"]
    with pytest.raises(ProcessLookupError):
        os.kill(found["pid"], 0)


def test_exception_carries_rank_traceback_and_output(pool: Pool) -> None:
    before = [d["pid"] for d in pool.run(2, describe)]
    with pytest.raises(PoolError) as caught:
        pool.run(2, raise_on, (0, 1))
    message = str(caught.value)
    assert caught.value.failed == (0, 1) and caught.value.hung == ()
    assert "rank 1 raised ValueError: planted on 1" in message and "in raise_on" in message
    assert "about to fail, says rank 1" in message
    assert [d["pid"] for d in pool.run(2, describe)] == before  # every rank reported: nothing to restart


def test_a_rank_that_raises_while_the_other_waits_and_a_killed_one_are_named(fragile: Pool) -> None:
    """After rank 1 raised, rank 0's wait is ended by the grace, and not by its task's hour."""
    with pytest.raises(PoolError, match="rank 1 raised ValueError: planted on 1") as caught:
        fragile.run(2, raise_on, (1,), timeout_s=3600)
    assert caught.value.failed == (1,) and caught.value.hung == (0,)
    assert "barrier" in str(caught.value)  # where rank 0 hung
    with pytest.raises(PoolError, match="rank 1 was killed by SIGKILL") as caught:
        fragile.run(2, die)
    assert 1 in caught.value.failed


def test_hang_ends_in_its_bound_and_the_pool_works_again(fragile: Pool) -> None:
    """Rank 0 has returned long before; rank 1 would take an hour."""
    fragile.run(2, describe)
    with pytest.raises(PoolError, match=f"rank 1 did not finish in {patient(LOADED):g} s") as caught:
        fragile.run(2, hang, timeout_s=1)
    assert caught.value.hung == (1,) and "in hang" in str(caught.value)
    assert len(fragile.run(2, sum_of_ranks, 0)) == 2


def test_exit_unpicklable_results_and_unusable_tasks_are_failures(pool: Pool) -> None:
    with pytest.raises(PoolError, match="rank 0 raised SystemExit: 3"):
        pool.run(1, leave_by_exit)
    with pytest.raises(PoolError, match="rank 0 raised .*pickle"):
        pool.run(1, unpicklable)

    with pytest.raises(ValueError, match=r"world=5 is outside \[1, max_world=4\]"):
        pool.run(5, describe)
    with pytest.raises(ValueError, match="module-level function"):
        pool.run(1, lambda rank, world: None)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors and threads in /proc")
def test_descriptors_and_threads_stay_flat(pool: Pool) -> None:
    counts = [pool.run(2, initialise_megatron)[0] for _ in range(16)]
    # The second run is the base: the first one's imports open files of their own. One leaked topology is +84 and +51.
    assert max(fds for fds, _ in counts[2:]) <= counts[1][0] + 2
    assert max(threads for _, threads in counts[2:]) <= counts[1][1] + 2

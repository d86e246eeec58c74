"""An event simulation of Megatron-Core's 1F1B and interleaved schedules: when each stage runs each micro-batch.

Pure numpy. The order on each pipeline rank follows Megatron-Core 0.16.1,
``pipeline_parallel/schedules.py``: get_pp_rank_microbatches (the number of warm-up forwards),
get_schedule_table (the interleaved order) and the loops of
forward_backward_pipelining_with_interleaving and _without_interleaving.

An operation is the forward or the backward of one micro-batch on one stage. It starts as soon as
its rank has ended the operation before it and the tensor that it needs has arrived. A tensor
arrives ``transfer_s`` after the operation that made it has ended. Sending costs the sender no time.
Nothing else is modelled.

Stages are counted in the order of the layers. With P ranks of V chunks each, stage s is chunk s // P
of pipeline rank s % P.

Invariants (tests/unit/planning/test_timeline.py):

1. Each stage runs each micro-batch once forward and once backward, for the seconds that the caller
   gives.
2. No two operations overlap on a rank, and each rank runs them in Megatron-Core's order.
3. A forward comes after the forward of the stage before. A backward comes after the backward of the
   stage after, and after its own forward.
4. No rank idles if its next operation could start.
5. If each stage takes f forward and b backward, the makespan is (M·V + P − 1) · (f + b) (Narayanan
   et al., arXiv:2104.04473, §2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Operation = tuple[int, int, bool]
"""(stage in the order of the layers, index of the micro-batch, True for a backward and False for a forward)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """Holds when each stage starts and ends the forward and the backward of each of M micro-batches.

    pipeline: the number of pipeline ranks.
    forward_start, forward_end, backward_start, backward_end: float64 [stages, M], seconds since the
        first forward began.

    Example: one stage, one micro-batch, forward 1 s and backward 2 s: ``forward_end=[[1]],
    backward_start=[[1]], makespan=3``.
    """

    pipeline: int
    forward_start: np.ndarray
    forward_end: np.ndarray
    backward_start: np.ndarray
    backward_end: np.ndarray

    @property
    def makespan(self) -> float:
        """Return the seconds from the first forward's start to the last backward's end; 0.0 without micro-batches."""
        return float(self.backward_end.max(initial=0.0))

    @property
    def busy_s(self) -> np.ndarray:
        """Return float64 [pipeline], the seconds that each pipeline rank computes."""
        spent = (self.forward_end - self.forward_start + self.backward_end - self.backward_start).sum(1)
        return spent.reshape(-1, self.pipeline).sum(0)

    @property
    def bubble_share(self) -> np.ndarray:
        """Return float64 [pipeline], the fraction of the makespan that each rank idles; 0 without micro-batches."""
        return 1.0 - self.busy_s / self.makespan if self.makespan else np.zeros(self.pipeline)


def warmup_forwards(rank: int, pipeline: int, virtual: int, microbatches: int, group: int) -> int:
    """Return the number of forwards that a pipeline rank runs before forwards and backwards alternate.

    Each forward is of one micro-batch and one chunk.

    pipeline, virtual: the numbers of pipeline ranks and of chunks of each.
    group: see ``schedule_table``.
    """
    count = pipeline - rank - 1 if virtual == 1 else (pipeline - rank - 1) * 2 + (virtual - 1) * group
    return min(count, microbatches * virtual)


def schedule_table(microbatches: int, virtual: int, group: int) -> list[tuple[int, int]]:
    """Return (micro-batch, chunk) for each forward of a pipeline rank, in the order in which it runs them.

    microbatches, virtual: the numbers of micro-batches and of the rank's chunks.
    group: the number of micro-batches that go through a chunk before the next chunk runs.

    Example: 2 micro-batches, 2 chunks, groups of 2 → (0, 0), (1, 0), (0, 1), (1, 1).
    """
    groups = [range(first, min(first + group, microbatches)) for first in range(0, microbatches, group)]
    return [(microbatch, chunk) for members in groups for chunk in range(virtual) for microbatch in members]


def rank_order(rank: int, pipeline: int, virtual: int, microbatches: int, group: int | None = None) -> list[Operation]:
    """Return a pipeline rank's operations in the order in which Megatron-Core's schedule runs them.

    Warm-up forwards come first. Then forwards and backwards alternate. The remaining backwards come
    last. Backwards go through the chunks in reverse.

    pipeline, virtual: the numbers of pipeline ranks and of chunks of each.
    group: Megatron-Core's ``microbatch_group_size_per_vp_stage``; None: ``pipeline``.
    """
    group = group or pipeline
    _check_group(pipeline, virtual, microbatches, group)
    table = schedule_table(microbatches, virtual, group)
    forwards = [(chunk * pipeline + rank, m, False) for m, chunk in table]
    backwards = [((virtual - 1 - chunk) * pipeline + rank, m, True) for m, chunk in table]
    warm = warmup_forwards(rank, pipeline, virtual, microbatches, group)
    turns = [step for pair in zip(forwards[warm:], backwards, strict=False) for step in pair]
    return forwards[:warm] + turns + backwards[len(forwards) - warm :]


def _check_group(pipeline: int, virtual: int, microbatches: int, group: int) -> None:
    if virtual == 1 or microbatches == 0:
        return
    if not pipeline <= group <= microbatches:
        raise ValueError(
            f"{microbatches} micro-batches in groups of {group} over {pipeline} pipeline ranks: Megatron-Core's "
            f"interleaved schedule wants a group of {pipeline} to {microbatches}; run a multiple of {pipeline} "
            "micro-batches"
        )
    if 0 < microbatches % group < pipeline:
        raise ValueError(
            f"{microbatches} micro-batches leave {microbatches % group} after groups of {group}, fewer than the "
            f"{pipeline} pipeline ranks, and Megatron-Core's interleaved schedule refuses that; run a multiple of "
            f"{group}"
        )


def simulate(
    forward_s: np.ndarray, backward_s: np.ndarray, *, pipeline: int, group: int | None = None, transfer_s: float = 0.0
) -> Timeline:
    """Return the simulated timeline of one data-parallel rank's micro-batches on its pipeline.

    forward_s, backward_s: [stages, M], seconds of each micro-batch on each stage, predicted or
        measured. Stages are in the order of the layers.
    pipeline: the number of pipeline ranks.
    group: the number of micro-batches that go through a chunk before the next chunk runs; None:
        ``pipeline``.
    transfer_s: seconds that a tensor takes from one stage to the next.

    Example: two stages, two micro-batches, forward 1 s and backward 2 s each: the makespan is (2 + 2
    − 1) · 3 = 9 s.
    """
    if forward_s.shape != backward_s.shape or forward_s.ndim != 2 or forward_s.shape[0] % pipeline:
        raise ValueError(
            f"forward seconds {forward_s.shape} and backward seconds {backward_s.shape} must both be [stages, "
            f"micro-batches], with a multiple of pipeline={pipeline} stages"
        )
    # The order of each rank's operations, and their times by [backward][stage][micro-batch]. An end
    # of −1 means that the operation has not ended.
    stages, microbatches = forward_s.shape
    orders = [rank_order(rank, pipeline, stages // pipeline, microbatches, group) for rank in range(pipeline)]
    seconds = (forward_s.tolist(), backward_s.tolist())
    ends = ([[-1.0] * microbatches for _ in range(stages)], [[-1.0] * microbatches for _ in range(stages)])
    starts = ([[0.0] * microbatches for _ in range(stages)], [[0.0] * microbatches for _ in range(stages)])
    # Each rank runs until it waits for another rank; rounds over the ranks until all are done.
    free, reached = [0.0] * pipeline, [0] * pipeline
    waiting = True
    while waiting:
        waiting = moved = False
        for rank, order in enumerate(orders):
            while reached[rank] < len(order):
                stage, microbatch, backward = order[reached[rank]]
                arrived = _arrival(stage, microbatch, backward, ends, stages, transfer_s)
                if arrived < 0:
                    waiting = True
                    break
                start = max(free[rank], arrived)
                starts[backward][stage][microbatch] = start
                ends[backward][stage][microbatch] = free[rank] = start + seconds[backward][stage][microbatch]
                reached[rank] += 1
                moved = True
        assert moved or not waiting, "the schedule waits for itself"  # _check_group refuses orders that deadlock
    shape = (stages, microbatches)
    arrays = [np.array(x, dtype=np.float64).reshape(shape) for x in (starts[0], ends[0], starts[1], ends[1])]
    return Timeline(
        pipeline=pipeline,
        forward_start=arrays[0],
        forward_end=arrays[1],
        backward_start=arrays[2],
        backward_end=arrays[3],
    )


def _arrival(stage: int, microbatch: int, backward: bool, ends: tuple, stages: int, transfer_s: float) -> float:
    """Return the time in seconds at which an operation's input arrives; below 0 if that is not known yet.

    backward: whether the operation is the micro-batch's backward on the stage, else its forward.
    ends: (forward, backward), each operation's end as [stage][micro-batch]; −1 before it has ended.
    """
    if not backward:
        if stage == 0:
            return 0.0
        end = ends[0][stage - 1][microbatch]
        return end + transfer_s if end >= 0 else end
    own = ends[0][stage][microbatch]
    if stage == stages - 1 or own < 0:
        return own
    end = ends[1][stage + 1][microbatch]
    return max(own, end + transfer_s) if end >= 0 else end

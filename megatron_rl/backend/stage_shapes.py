"""The shapes of the tensors that pipeline stages send each other, taken from the plan that every rank holds.

Micro-batches differ in size. So Megatron-Core sends each tensor's shape ahead of the tensor, and
the receiving host waits until it can read the shape (0.16.1 and 0.19.2
pipeline_parallel/p2p_communication.py ``_communicate_shapes``). A stage receives micro-batches in
the order in which it runs them, so the plan gives each shape. This module replaces
``_communicate_shapes``: no shape is sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import LockstepError
from megatron_rl.planning.timeline import rank_order

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # isort: skip

Shape = tuple[int, int, int]
NOTHING = [0, 0, 0]
_exchange = P2PCommunicator._communicate_shapes
_under_way: list[_Expected] = []  # the shapes of the schedule's current run; empty between runs


class _Expected:
    """Gives the shapes of the tensors that this rank is about to receive, in order.

    shape_of: a function from a micro-batch's number to the shape of its tensor between two pipeline
        stages.
    """

    def __init__(self, topology: Topology, num_microbatches: int, shape_of: Callable[[int], Shape]) -> None:
        last = topology.pipeline_size * topology.virtual_size - 1
        order = rank_order(topology.pipeline_rank, topology.pipeline_size, topology.virtual_size, num_microbatches)
        self.shape_of, self.topology = shape_of, topology
        self.forward = iter([m for stage, m, backward in order if not backward and stage != 0])
        self.backward = iter([m for stage, m, backward in order if backward and stage != last])

    def next(self, waiting: Iterator[int]) -> list[int]:
        microbatch = next(waiting, None)
        if microbatch is None:
            raise LockstepError(
                f"{self.topology.who(self.topology.rank)} is to receive more tensors than planned: "
                "Megatron-Core runs another schedule than planning/timeline.py says"
            )
        return list(self.shape_of(microbatch))


def _from_plan(communicator, tensor_send_next, tensor_send_prev, recv_prev, recv_next):
    """Return (shape to receive from the previous pipeline stage, shape to receive from the next).

    A shape is [0, 0, 0] if nothing is to be received from that stage. This function replaces
    Megatron-Core's ``_communicate_shapes`` and has its parameters. Outside of a ``planned`` context it
    calls the original.
    """
    if not _under_way:
        return _exchange(communicator, tensor_send_next, tensor_send_prev, recv_prev, recv_next)
    expected = _under_way[-1]
    return (
        expected.next(expected.forward) if recv_prev else list(NOTHING),
        expected.next(expected.backward) if recv_next else list(NOTHING),
    )


P2PCommunicator._communicate_shapes = _from_plan


@contextlib.contextmanager
def planned(
    topology: Topology, num_microbatches: int, shape_of: Callable[[int], Shape], *, forward_only: bool
) -> Iterator[None]:
    """Return a context for one run of the schedule, in which stages send each other no shapes. Not a collective.

    Instead, ``shape_of`` gives a stage the shape of each tensor that it receives.

    shape_of: a function from a micro-batch's number to the shape of its tensor between two pipeline
        stages.
    forward_only: whether the run has no backward passes.

    Raises LockstepError if the schedule receives more or fewer tensors than planning/timeline.py says.
    """
    expected = _Expected(topology, num_microbatches, shape_of)
    _under_way.append(expected)
    try:
        yield
    finally:
        _under_way.remove(expected)
    left = len(list(expected.forward)) + (0 if forward_only else len(list(expected.backward)))
    if left:
        raise LockstepError(
            f"{topology.who(topology.rank)} received {left} tensors fewer than planned: Megatron-Core runs "
            "another schedule than planning/timeline.py says"
        )

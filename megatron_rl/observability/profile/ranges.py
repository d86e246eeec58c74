"""The named ranges around a run's passes and calls, which a profiler shows: put on for a recording, then removed.

A range around a public method is set by an attribute of the instance, which hides the class's
method for this instance alone. The ranges around forward and backward passes are opened by the
pipeline schedule itself, which calls a PassWatch (backend/part.py). No range reads a tensor or draws
a random number.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from megatron_rl.backend.packing import PackedMicroBatch, Packer
from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.distributed.topology import Topology
from megatron_rl.planning.timeline import rank_order
from megatron_rl.types import StepKind

Mark = Callable[[str], AbstractContextManager[None]]
"""A function that takes a name and returns a context manager, which puts a range of this name around its block."""

STEPS = {StepKind.REAL: "optimizer step", StepKind.GHOST: "ghost step", StepKind.HELD: "held step"}


@contextlib.contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """Return a context with an NVTX range called ``name`` around it, for Nsight Systems. Needs CUDA."""
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def mark_for(*, traces: bool, nvtx: bool) -> Mark:
    """Return a function that takes a name and returns a context manager, which puts a range around its block.

    traces: whether torch.profiler records the range.
    nvtx: whether Nsight Systems shows the range, by NVTX.
    """

    @contextlib.contextmanager
    def mark(name: str) -> Iterator[None]:
        with contextlib.ExitStack() as contexts:
            if nvtx:
                contexts.enter_context(nvtx_range(name))
            if traces:
                contexts.enter_context(torch.profiler.record_function(name))
            yield

    return mark


class WatchedPasses:
    """Puts a range around every forward, loss and backward of a model's micro-batches (a PassWatch).

    A range's name holds the micro-batch's number within its step on this replica, from 0. It also
    holds the pipeline stage in the order of the layers, and the number of this rank's model chunk.

    Example: ``forward mb=3 stage=1 chunk=0``; the passes of one step lie in a range ``passes that
    train``.
    """

    def __init__(self, mark: Mark, topology: Topology, prefix: str, ended: Callable[[], None]) -> None:
        """Keep the arguments; no pass is counted yet.

        mark: the function that puts a named range around a block (``mark_for``).
        topology: tells this rank's pipeline stages.
        prefix: the text before every range's name.
        ended: a function called after the passes of each step.
        """
        self._mark, self._topology, self._prefix, self._ended = mark, topology, prefix, ended
        self._forwards: Counter[int] = Counter()
        self._losses = 0
        self._backwards: Iterator[tuple[int, int]] = iter(())

    @contextlib.contextmanager
    def running(self, num_microbatches: int, *, trains: bool) -> Iterator[None]:
        """Put a range around a step's passes, and count its micro-batches from 0.

        trains: whether the passes compute gradients; otherwise they only read log-probs or values.
        """
        grid = self._topology
        self._forwards, self._losses = Counter(), 0
        order = rank_order(grid.pipeline_rank, grid.pipeline_size, grid.virtual_size, num_microbatches)
        self._backwards = iter([(stage, number) for stage, number, backward in order if backward])
        with self._mark(f"{self._prefix}passes that {'train' if trains else 'read'}"):
            yield
        self._ended()

    def forward(self, chunk: int, microbatch: PackedMicroBatch) -> AbstractContextManager[None]:
        """Return a range for the next forward pass of a model chunk; its name marks a filler micro-batch as such."""
        number, stage = self._forwards[chunk], chunk * self._topology.pipeline_size + self._topology.pipeline_rank
        self._forwards[chunk] += 1
        filler = " filler" if microbatch.source is not None and microbatch.source.filler else ""
        return self._mark(f"{self._prefix}forward mb={number} stage={stage} chunk={chunk}{filler}")

    def loss(self) -> AbstractContextManager[None]:
        """Return a range for the loss of the next micro-batch."""
        self._losses += 1
        return self._mark(f"{self._prefix}loss mb={self._losses - 1}")

    def backward(self) -> AbstractContextManager[None]:
        """Return a range for the next backward pass, in the order of the schedule."""
        stage, number = next(self._backwards)
        chunk = stage // self._topology.pipeline_size
        return self._mark(f"{self._prefix}backward mb={number} stage={stage} chunk={chunk}")


class _WatchedPacker:
    """Packs micro-batches by the Packer that it wraps, each within a range named by the micro-batch's number.

    mark: the function that puts a named range around a block (``mark_for``).
    prefix: the text before every range's name.

    The numbers begin at 0 after ``restart``, which is called when a step's passes end. By then every
    micro-batch of the step has been packed once, and no micro-batch of the next step has been.
    """

    def __init__(self, packer: Packer, mark: Mark, prefix: str) -> None:
        self._packer, self._mark, self._prefix, self._count = packer, mark, prefix, 0

    def restart(self) -> None:
        """Number the next micro-batch 0."""
        self._count = 0

    def pack(self, *args: object, **kwargs: object) -> PackedMicroBatch:
        """Return what the wrapped Packer's ``pack`` returns for these arguments; the packing thread calls this."""
        number, self._count = self._count, self._count + 1
        with self._mark(f"{self._prefix}pack mb={number}"):
            return self._packer.pack(*args, **kwargs)


class Ranges:
    """Puts named ranges around methods of a run's objects, and removes them again. No method is a collective.

    mark: the function that puts a named range around a block (``mark_for``).
    whole: the name of the range that lasts until all ranges are removed.
    """

    def __init__(self, mark: Mark, whole: str) -> None:
        self.mark = mark
        self._undo = contextlib.ExitStack()
        self._undo.enter_context(mark(whole))

    def put_around(self, owner: object, method: str, name: str | Callable[..., str]) -> None:
        """Put a range around each call of the method ``method`` of the object ``owner``.

        name: the range's name, or a function that takes the call's arguments and returns the name.
        """
        true, own = getattr(owner, method), method in vars(owner)

        @functools.wraps(true)
        def ranged(*args, **kwargs):
            with self.mark(name if isinstance(name, str) else name(*args, **kwargs)):
                return true(*args, **kwargs)

        setattr(owner, method, ranged)
        self._undo.callback(*((setattr, owner, method, true) if own else (delattr, owner, method)))

    def put_around_model(self, model: TrainableModel, prefix: str = "") -> None:
        """Put ranges around a model's passes, packing, reduction of gradients and optimizer steps.

        prefix: the text before the ranges' names, for a model that is not the policy.
        """
        schedule, packer = model.schedule, model.packer
        watched = _WatchedPacker(packer, self.mark, prefix)
        schedule.watches = (WatchedPasses(self.mark, model.topology, prefix, ended=watched.restart),)
        model.packer = watched
        self._undo.callback(setattr, model, "packer", packer)
        self._undo.callback(setattr, schedule, "watches", ())
        self.put_around(model.optimizer, "reduce_gradients", f"{prefix}reduction")
        self.put_around(model, "optim_step", lambda kind, *_, **__: prefix + STEPS[kind])

    def take_off(self) -> None:
        """Remove the ranges from all methods and models, and end the range around the whole recording."""
        self._undo.close()

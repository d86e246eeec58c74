"""The pipeline schedule: the one file that calls Megatron-Core's forward_backward, and the contract of that call.

The contract (read and run on megatron-core 0.16.1; ``pipeline_parallel/schedules.py``
forward_step_calc_loss, ``distributed/finalize_model_grads.py``):

- With ``calculate_per_token_loss=True`` and a 3-tuple loss the schedule divides nothing and DDP's
  scale is 1.0. So the gradients of micro-batches and of data-parallel ranks **add**. The tuple's
  token count is 1, and nothing reads it.
- While a step accumulates, ``finalize_model_grads_func`` is None and gradient hooks are held off.
  So any number of calls may precede one optimizer step. backend/optimizer.py starts and finishes
  the one reduction.
- A rank without micro-batches (a silent rank) does not call the schedule. Without a pipeline,
  Megatron-Core would run one micro-batch even if told to run none.
- Under ``overlap_param_gather`` the forward pass gathers the parameters. In a step with a silent
  rank, all ranks gather before the schedule, in one order. Otherwise the other ranks would wait for
  a collective that the silent rank never issues.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.backend.packing import PackedMicroBatch
from megatron_rl.backend.part import BackendPart, PassWatch
from megatron_rl.distributed.collectives import gather_json, reduce_on_host
from megatron_rl.distributed.platform import HOST
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import LockstepError
from megatron_rl.planning.cost import NUM_SUMS, measured
from megatron_rl.planning.timeline import rank_order
from megatron_rl.types import StepKind, StepPlan

from megatron.core.distributed import DistributedDataParallel  # isort: skip
from megatron.core.pipeline_parallel import schedules  # isort: skip

LossFunction = Callable[[PackedMicroBatch, torch.Tensor], tuple[torch.Tensor, dict]]
"""(micro-batch, hidden states [N, H] at its loss positions, before the output layer) → (loss sum, dict to return)."""


def check_lockstep(step: int, kind: StepKind, fingerprint: bytes, topology: Topology) -> None:
    """Raise LockstepError on every rank if ranks are about to run different steps; a collective.

    The error names the ranks that differ, and their difference: step index, step kind or plan.

    fingerprint: a digest of this rank's plan.
    """
    digest = torch.tensor(
        list(hashlib.sha256(f"{step}/{kind.value}/".encode() + fingerprint).digest()[:8]), dtype=torch.int64
    )
    both = reduce_on_host(torch.cat([digest, -digest]), dist.ReduceOp.MIN)
    if torch.equal(both[:8], -both[8:]):
        return
    # the digests differ: gather every rank's step, kind and plan, and name the minority
    views = gather_json([step, kind.value, fingerprint.hex()])
    differences = []
    for name, position in (("step index", 0), ("step kind", 1), ("plan", 2)):
        values = [view[position] for view in views]
        usual = max(set(values), key=lambda value: (values.count(value), -values.index(value)))
        odd = [f"{topology.who(rank)} has {str(value)[:16]}" for rank, value in enumerate(values) if value != usual]
        if odd:
            differences.append(f"{name}: {', '.join(odd)}, the others {str(usual)[:16]}")
    raise LockstepError(
        f"ranks are about to run different steps (seen by rank {topology.rank} of {topology.world_size}): "
        f"{'; '.join(differences)}. Their lengths, rewards, advantages or configuration differ; compare the ranks "
        "named"
    )


class _Laps:
    """Times the device's work within each context that ``lap()`` returns, such as one forward pass.

    On CUDA it records events, so the host waits only when it reads them.
    """

    def __init__(self) -> None:
        self.marks: list[tuple] = []

    @contextlib.contextmanager
    def lap(self) -> Iterator[None]:
        begun = _mark()
        yield
        self.marks.append((begun, _mark()))


def _seconds(marks: Sequence[tuple]) -> np.ndarray:
    """Return the seconds between each pair of marks, float64; the device must have finished the work between them.

    marks: (start, end) pairs: CUDA events on a GPU, else seconds of the host's clock.
    """
    if HOST.is_cuda:
        return np.array([begun.elapsed_time(ended) / 1000 for begun, ended in marks])
    return np.array([ended - begun for begun, ended in marks], dtype=np.float64)


HOST_CLOCK = time.perf_counter
"""The clock of a lap on the CPU. A benchmark whose processes share cores sets it to ``time.thread_time``."""


def _mark():
    if not HOST.is_cuda:
        return HOST_CLOCK()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@contextlib.contextmanager
def _timed_backward(laps: _Laps, watches: Sequence[PassWatch]) -> Iterator[None]:
    """Return a context that times each micro-batch's backward pass through each model chunk, without communication.

    laps: takes the times.
    watches: observers, whose ``backward()`` context is entered around each backward pass.

    Every schedule (megatron-core 0.16.1, 0.19.2) calls ``schedules.backward_step`` by this name,
    once per micro-batch and chunk. So the context replaces the function under this name.
    """
    true_step = schedules.backward_step

    @functools.wraps(true_step)
    def timed_step(*args, **kwargs):
        with laps.lap(), contextlib.ExitStack() as contexts:
            for watch in watches:
                contexts.enter_context(watch.backward())
            return true_step(*args, **kwargs)

    schedules.backward_step = timed_step
    try:
        yield
    finally:
        schedules.backward_step = true_step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageLaps:
    """Holds the times of one run of the schedule on this rank, and the sizes of its M micro-batches.

    All arrays are float64.

    forward_s, backward_s: [chunks, M], the seconds of each micro-batch in each model chunk; the
        forward includes the loss.
    tokens, squares: [M], Σ l and Σ l² (``Layout.squares``) of each micro-batch, over the lengths l
        of its sequences.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    tokens: np.ndarray
    squares: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """Holds the start and end marks of each forward and backward pass in one run of the schedule.

    forwarded: (model chunk's index, micro-batch) of each pair of marks in ``forward``.
    forward, backward: (start, end) marks, as ``_seconds`` takes them.
    """

    forwarded: list[tuple[int, PackedMicroBatch]]
    forward: list[tuple]
    backward: list[tuple]

    def laps(self, topology: Topology, windows: tuple[int, ...]) -> StageLaps:
        # forward: a micro-batch's model and loss are two laps, added up
        packed = list(dict.fromkeys(microbatch for _, microbatch in self.forwarded))
        number_of = {id(x): i for i, x in enumerate(packed)}
        shape = (topology.virtual_size, len(packed))
        forward_s, backward_s = np.zeros(shape), np.zeros(shape)
        indices = [(chunk, number_of[id(microbatch)]) for chunk, microbatch in self.forwarded]
        np.add.at(forward_s, tuple(np.array(indices).T), _seconds(self.forward))
        # backward: laps come in the schedule's order
        order = rank_order(topology.pipeline_rank, topology.pipeline_size, topology.virtual_size, len(packed))
        backwards = [(stage // topology.pipeline_size, microbatch) for stage, microbatch, backward in order if backward]
        backward_s[tuple(np.array(backwards).T)] = _seconds(self.backward)
        return StageLaps(
            forward_s=forward_s,
            backward_s=backward_s,
            tokens=np.array([float(x.packed.layout.num_tokens) for x in packed]),
            squares=np.array([x.packed.layout.squares(windows) for x in packed]),
        )


class Schedule:
    """Runs packed micro-batches through this rank's pipeline stage, forward and, in training, backward.

    windows: each layer's attention window in tokens; () if no layer has one. ``StageLaps.squares``, a
        measure of attention's cost, depends on it.
    parts: optional features (backend/part.py), whose contexts are entered around every pass.
    watches: observers such as a profiler (``PassWatch``), whose contexts are entered too. A profiler
        sets this attribute.
    """

    watches: tuple[PassWatch, ...] = ()

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        topology: Topology,
        windows: tuple[int, ...] = (),
        parts: tuple[BackendPart, ...] = (),
    ) -> None:
        self.chunks = list(chunks)
        self.topology, self.windows, self.parts = topology, windows, parts
        self.run_schedule = schedules.get_forward_backward_func()
        self._forward, self._backward = _Laps(), _Laps()
        self._forwarded: list[tuple[int, PackedMicroBatch]] = []
        self._runs: list[_Run] = []
        for chunk in self.chunks:
            chunk.config.finalize_model_grads_func = None
            chunk.config.no_sync_func = None
            chunk.config.grad_sync_func = None

    def gather_parameters(self) -> None:
        """Gather the parameters that ``overlap_param_gather`` left for later, model chunk after chunk. A collective."""
        for chunk in self.chunks:
            if chunk.ddp_config.use_distributed_optimizer and chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def run(
        self, mini_batch: StepPlan, microbatches: Sequence[PackedMicroBatch], loss: LossFunction, *, forward_only: bool
    ) -> list[dict]:
        """Run the micro-batches; on the last stage, return the dict that ``loss`` returned for each micro-batch.

        Returns [] on other stages, on a rank without micro-batches, and if the step runs no sample.

        mini_batch: the plan of the optimizer step.
        loss: called on the last stage with a micro-batch and its hidden states.
        forward_only: whether to leave out the backward passes.
        """
        if mini_batch.kind is not StepKind.REAL:
            return []
        if mini_batch.silent_ranks:
            self.gather_parameters()
        if not microbatches:
            return []
        with contextlib.ExitStack() as contexts:
            for chunk in self.chunks:
                contexts.enter_context(chunk.no_sync())
            if forward_only:
                contexts.enter_context(torch.no_grad())
            if self.topology.pipeline_size > 1:
                contexts.enter_context(self._planned_shapes(microbatches, forward_only))
            self._forwarded, self._forward.marks, self._backward.marks = [], [], []
            for watch in self.watches:
                contexts.enter_context(watch.running(len(microbatches), trains=not forward_only))
            contexts.enter_context(_timed_backward(self._backward, self.watches))
            for part in self.parts:
                contexts.enter_context(part.running())
            reports = self.run_schedule(
                forward_step_func=partial(self._forward_step, loss=loss, trains=not forward_only),
                data_iterator=[iter(microbatches) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(microbatches),
                seq_length=1,  # unused: each micro-batch has its own length (variable_seq_lengths, stage_shapes)
                micro_batch_size=1,
                forward_only=forward_only,
            )
        if not forward_only:
            self._runs.append(
                _Run(forwarded=self._forwarded, forward=self._forward.marks, backward=self._backward.marks)
            )
        self._forwarded = []
        return reports

    def _planned_shapes(
        self, microbatches: Sequence[PackedMicroBatch], forward_only: bool
    ) -> contextlib.AbstractContextManager[None]:
        from megatron_rl.backend import stage_shapes

        config = self.chunks[0].config
        ranks = self.topology.tensor_size if config.sequence_parallel else 1

        def shape_of(number: int) -> stage_shapes.Shape:
            return len(microbatches[number].positions) // ranks, 1, config.hidden_size

        return stage_shapes.planned(self.topology, len(microbatches), shape_of, forward_only=forward_only)

    def _forward_step(self, iterator, model, *, loss: LossFunction, trains: bool):
        microbatch: PackedMicroBatch = next(iterator)
        chunk_and_microbatch = next(i for i, chunk in enumerate(self.chunks) if chunk is model), microbatch
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(self._forward.lap())
            for part in self.parts:
                contexts.enter_context(part.forward(*chunk_and_microbatch, trains=trains))
            for watch in self.watches:
                contexts.enter_context(watch.forward(*chunk_and_microbatch))
            output = model(
                microbatch.tokens, microbatch.packed.position_ids[None], None, packed_seq_params=microbatch.packed
            )
        self._forwarded.append(chunk_and_microbatch)

        def loss_sum(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
            with self._forward.lap(), contextlib.ExitStack() as contexts:
                for watch in self.watches:
                    contexts.enter_context(watch.loss())
                total, kept = loss(microbatch, hidden[0].index_select(0, microbatch.loss_positions))
            self._forwarded.append(chunk_and_microbatch)
            return total, torch.ones((), dtype=torch.int32, device=total.device), kept

        return output, loss_sum

    def drop_hooks(self) -> None:
        """Remove autograd's hooks from the model chunks. Not a collective."""
        for chunk in self.chunks:
            # a chunk and its hooks hold each other through C++, a cycle that Python's collector does not see
            chunk.grad_accs.clear()
            if chunk.ddp_config.use_distributed_optimizer and chunk.ddp_config.overlap_param_gather:
                chunk.disable_forward_pre_hook(param_sync=False)

    def forget_measured(self) -> None:
        """Drop the times measured since the last ``take_laps``, without waiting for the device."""
        self._runs = []

    def take_laps(self) -> list[StageLaps]:
        """Return the times of each training ``run`` since the last call.

        Call it after an optimizer step. The step reads the gradient norm, so the device has finished
        the timed passes.
        """
        runs, self._runs = self._runs, []
        return [run.laps(self.topology, self.windows) for run in runs]


def measured_sums(runs: Sequence[StageLaps]) -> np.ndarray:
    """Return the sums that the cost model is fitted to, over this rank's micro-batches: float64 [cost.NUM_SUMS].

    They are sums of times and sizes, in the order of ``planning.cost.measured``. A micro-batch's time
    is the sum of its times in the rank's model chunks.

    runs: the times of each run of the schedule.
    """
    if not runs:
        return np.zeros(NUM_SUMS)
    forward_s = np.concatenate([run.forward_s.sum(0) for run in runs])
    tokens, squares = (np.concatenate([getattr(run, name) for run in runs]) for name in ("tokens", "squares"))
    return measured(tokens, squares, forward_s, float(sum(run.backward_s.sum() for run in runs)))

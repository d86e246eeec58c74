"""StepPlan → gradients. The one caller of Megatron-Core's forward_backward, and the one place that knows its contract.

The seam (read and run on 0.16.1; ``pipeline_parallel/schedules.py`` forward_step_calc_loss, ``distributed/finalize_model_grads.py``):

- ``calculate_per_token_loss=True`` and a 3-tuple loss: the schedule divides nothing, DDP's scale is 1.0, so micro-batches and
  data-parallel ranks **add**. The token count of the tuple is 1 and nothing reads it.
- ``finalize_model_grads_func`` is None while a step accumulates and gradient hooks are held off, so that any number of calls
  may precede one optimizer step; optimizer.py starts and finishes the one reduction.
- A rank without micro-batches never enters: with M = 0 the schedule without pipeline would still run one.
- A forward pass is what gathers parameters under ``overlap_param_gather``. In a step with a silent rank all ranks gather first,
  at once and in one order; else a real rank would wait for a collective that the silent one never issues.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.cost import measured
from megatron_rl.exchange import gather_json
from megatron_rl.packing import PackedMicroBatch
from megatron_rl.platform import HOST
from megatron_rl.topology import Topology
from megatron_rl.types import LockstepError, MiniBatchPlan, StepKind

from megatron.core.distributed import DistributedDataParallel  # isort: skip
from megatron.core.pipeline_parallel import schedules  # isort: skip

LossFunction = Callable[[PackedMicroBatch, torch.Tensor], tuple[torch.Tensor, dict]]
"""(micro-batch, hidden states [N, H] at its loss positions, what the output layer takes) → (scalar loss sum, what to hand back)."""


def check_lockstep(step: int, kind: StepKind, fingerprint: bytes, topology: Topology) -> None:
    """Raises LockstepError on every rank, naming who differs and in what, where ranks are not about to run the same thing."""
    digest = torch.tensor(list(hashlib.sha256(f"{step}/{kind.value}/".encode() + fingerprint).digest()[:8]), dtype=torch.int64)
    low = digest.to(HOST.device)
    both = torch.cat([low, -low])
    dist.all_reduce(both, op=dist.ReduceOp.MIN)
    if torch.equal(both[:8], -both[8:]):
        return
    views = gather_json([step, kind.value, fingerprint.hex()])
    differences = []
    for name, position in (("step index", 0), ("step kind", 1), ("plan", 2)):
        said = [view[position] for view in views]
        usual = max(set(said), key=lambda value: (said.count(value), -said.index(value)))
        odd = [f"{topology.who(rank)} has {str(value)[:16]}" for rank, value in enumerate(said) if value != usual]
        if odd:
            differences.append(f"{name}: {', '.join(odd)}, the others {str(usual)[:16]}")
    raise LockstepError(
        f"ranks are about to run different steps (seen by rank {topology.rank} of {topology.world_size}): {'; '.join(differences)}. "
        "Their lengths, rewards, advantages or configuration differ; compare the ranks named"
    )


class _Laps:
    """Device seconds of what ran between ``start`` and ``stop``, read only when asked: on CUDA by events, which wait for nothing."""

    def __init__(self) -> None:
        self.marks: list[tuple] = []

    @contextlib.contextmanager
    def lap(self) -> Iterator[None]:
        begun = _mark()
        yield
        self.marks.append((begun, _mark()))

    def take(self) -> np.ndarray:
        """float64, seconds of each lap since the last ``take``; the device must have come past them."""
        taken, self.marks = self.marks, []
        if HOST.is_cuda:
            return np.array([begun.elapsed_time(ended) / 1000 for begun, ended in taken])
        return np.array([ended - begun for begun, ended in taken])


def _mark():
    if not HOST.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


_BACKWARD = _Laps()
_true_backward_step = schedules.backward_step


@functools.wraps(_true_backward_step)
def _measured_backward_step(*args, **kwargs):
    with _BACKWARD.lap():
        return _true_backward_step(*args, **kwargs)


# Every schedule (0.16.1, 0.19.2) calls it by this name, once per micro-batch and chunk, communication apart.
schedules.backward_step = _measured_backward_step


class Schedule:
    """Runs packed micro-batches through this rank's stage, forward and (unless ``forward_only``) backward."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], topology: Topology):
        self.chunks = list(chunks)
        self.topology = topology
        self.run_schedule = schedules.get_forward_backward_func()
        self._forward = _Laps()
        self._forwarded: list[PackedMicroBatch] = []
        for chunk in self.chunks:
            chunk.config.finalize_model_grads_func = None
            chunk.config.no_sync_func = None
            chunk.config.grad_sync_func = None

    def gather_parameters(self) -> None:
        """Ends any parameter gather still owed under ``overlap_param_gather``, on all ranks in one order."""
        for chunk in self.chunks:
            if chunk.ddp_config.use_distributed_optimizer and chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def run(
        self, mini_batch: MiniBatchPlan, microbatches: Sequence[PackedMicroBatch], loss: LossFunction, *, forward_only: bool
    ) -> list[dict]:
        """What ``loss`` handed back per micro-batch, on the last stage; [] elsewhere, on a silent rank, and for a ghost."""
        if mini_batch.kind is StepKind.GHOST:
            return []
        if mini_batch.silent_ranks:
            self.gather_parameters()
        if not microbatches:
            return []
        with contextlib.ExitStack() as held:
            for chunk in self.chunks:
                held.enter_context(chunk.no_sync())
            if forward_only:
                held.enter_context(torch.no_grad())
            return self.run_schedule(
                forward_step_func=partial(self._forward_step, loss=loss, trains=not forward_only),
                data_iterator=[iter(microbatches) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(microbatches),
                seq_length=1,  # shapes travel with the tensors (variable_seq_lengths)
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def _forward_step(self, iterator, model, *, loss: LossFunction, trains: bool):
        microbatch: PackedMicroBatch = next(iterator)
        clock = self._forward if trains else _Laps()
        with clock.lap():
            output = model(microbatch.tokens, microbatch.packed.position_ids[None], None, packed_seq_params=microbatch.packed)
        if trains:
            self._forwarded.append(microbatch)

        def loss_sum(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
            with clock.lap():
                total, kept = loss(microbatch, hidden[0].index_select(0, microbatch.loss_positions))
            if trains:
                self._forwarded.append(microbatch)
            return total, torch.ones((), dtype=torch.int32, device=total.device), kept

        return output, loss_sum

    def forget_measured(self) -> None:
        """Drops what was measured since the last ``take_measured``; asks the device nothing."""
        self._forwarded = []
        self._forward.marks, _BACKWARD.marks = [], []

    def take_measured(self) -> np.ndarray:
        """float64 [cost.NUM_SUMS]: this stage's micro-batches since the last call, all chunks of one and its loss taken together.

        To be called where the device has come past them (a step's end reads the gradient norm).
        """
        seconds, microbatches = self._forward.take(), self._forwarded
        self._forwarded = []
        of = {id(x): i for i, x in enumerate(dict.fromkeys(microbatches))}
        forward_s = np.zeros(len(of))
        np.add.at(forward_s, [of[id(x)] for x in microbatches], seconds)
        lengths = [np.array(x.packed.lengths, dtype=np.float64) for x in dict.fromkeys(microbatches)]
        tokens, squares = np.array([x.sum() for x in lengths]), np.array([(x**2).sum() for x in lengths])
        return measured(tokens, squares, forward_s, float(_BACKWARD.take().sum()))

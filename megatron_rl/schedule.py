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
import hashlib
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from megatron_rl.exchange import gather_json
from megatron_rl.packing import PackedMicroBatch
from megatron_rl.platform import HOST
from megatron_rl.topology import Topology
from megatron_rl.types import LockstepError, MiniBatchPlan, StepKind

from megatron.core.distributed import DistributedDataParallel  # isort: skip
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # isort: skip

LossFunction = Callable[[PackedMicroBatch, torch.Tensor], tuple[torch.Tensor, dict]]
"""(micro-batch, logits [N, V/TP] at its loss positions) → (scalar loss sum, what to hand back)."""


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


class Schedule:
    """Runs packed micro-batches through this rank's stage, forward and (unless ``forward_only``) backward."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], topology: Topology):
        self.chunks = list(chunks)
        self.topology = topology
        self.run_schedule = get_forward_backward_func()
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
                forward_step_func=partial(_forward_step, loss=loss),
                data_iterator=[iter(microbatches) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(microbatches),
                seq_length=1,  # shapes travel with the tensors (variable_seq_lengths)
                micro_batch_size=1,
                forward_only=forward_only,
            )


def _forward_step(iterator, model, *, loss: LossFunction):
    microbatch: PackedMicroBatch = next(iterator)
    output = model(microbatch.tokens, microbatch.position_ids, None, packed_seq_params=microbatch.packed)

    def loss_sum(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
        total, kept = loss(microbatch, logits[0].index_select(0, microbatch.loss_positions))
        return total, torch.ones((), dtype=torch.int32, device=total.device), kept

    return output, loss_sum

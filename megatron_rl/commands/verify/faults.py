"""Faults that megatron-rl verify can put into a run under the user's parallelism, to show that it finds them.

They are typical mistakes of code that is changed for other parallelism, or that patches
Megatron-Core.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.backend import MegatronBackend
from megatron_rl.errors import ConfigError
from megatron_rl.model.rotary import PackedRotary

from megatron.core.models.common.embeddings import rope_utils  # isort: skip  (after platform)
from megatron.core.tensor_parallel import layers as parallel_layers  # isort: skip

FAULTS = {
    "tp_all_reduce": "one layer's attention output stays each tensor rank's own share, not their sum",
    "microbatch_mean": "an extra 1/M on the loss of each of M micro-batches",
    "context_offset": "the last context rank rotates its queries and keys as if they stood one position further on",
    "other_plan": "the last rank drops samples that the others run",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Names a fault, and the layer that gets it.

    name: a key of FAULTS, such as ``microbatch_mean``.
    layer: the number of the layer, from 0, in which ``tp_all_reduce`` is planted. The other faults
        are in no single layer and ignore this number.
    """

    name: str
    layer: int

    @contextlib.contextmanager
    def planted(self, backend: MegatronBackend) -> Iterator[None]:
        """Return a context manager that puts the fault into the backend's model or planner.

        Some faults end with the context. The others last as long as the backend. Raises ConfigError
        if a run with these settings cannot have this fault.
        """
        with {
            "tp_all_reduce": _tp_all_reduce,
            "microbatch_mean": _microbatch_mean,
            "context_offset": _context_offset,
            "other_plan": _other_plan,
        }[self.name](backend, self.layer):
            yield


def _refuse(name: str, relation: str, way_out: str) -> ConfigError:
    return ConfigError(f"--inject {name} cannot be planted: {relation}; {way_out}")


@contextlib.contextmanager
def _tp_all_reduce(backend: MegatronBackend, layer: int) -> Iterator[None]:
    topology = backend.topology
    if topology.tensor_size == 1:
        raise _refuse(
            "tp_all_reduce", "parallel.tensor=1 has no tensor-parallel reduction to leave out", "give parallel.tensor=2"
        )
    if backend.shape.layer_spec != "torch":
        raise _refuse(
            "tp_all_reduce", f"the {backend.shape.layer_spec} layers reduce in their own code", "give --dtype float32"
        )
    # Replace the reductions, but only within the forward of this layer's projection.
    blocks = {block.layer_number - 1: block for chunk in backend.chunks for block in chunk.module.decoder.layers}
    if not 0 <= layer < backend.shape.num_layers:
        raise _refuse(
            "tp_all_reduce", f"--inject-layer {layer} is none of the {backend.shape.num_layers} layers", "count from 0"
        )
    replaced = {
        "reduce_from_tensor_model_parallel_region": lambda x, **_: x,
        "reduce_scatter_to_sequence_parallel_region": lambda x, **_: x.chunk(topology.tensor_size)[
            topology.tensor_rank
        ].contiguous(),
    }
    original = {name: getattr(parallel_layers, name) for name in replaced}
    if layer in blocks:
        projection = output_projection(blocks[layer])
        true_forward = projection.forward

        @functools.wraps(true_forward)
        def forward(*args, **kwargs):
            vars(parallel_layers).update(replaced)
            try:
                return true_forward(*args, **kwargs)
            finally:
                vars(parallel_layers).update(original)

        projection.forward = forward
    yield


def output_projection(block: torch.nn.Module) -> torch.nn.Module:
    """Return the last linear layer of a block's attention, or of its gated delta net."""
    parts = dict(block.self_attention.named_children())
    return parts["out_proj" if "out_proj" in parts else "linear_proj"]


@contextlib.contextmanager
def _microbatch_mean(backend: MegatronBackend, layer: int) -> Iterator[None]:
    run = backend.schedule.run

    def averaging(mini_batch, microbatches, loss, *, forward_only: bool):
        count = int(mini_batch.num_microbatches.max(initial=1))
        if not forward_only and count == 1:
            raise _refuse(
                "microbatch_mean",
                "a replica runs one micro-batch, and 1/1 is no fault",
                "lower plan.max_tokens_per_microbatch",
            )

        def mean(microbatch, hidden: torch.Tensor) -> tuple[torch.Tensor, dict]:
            total, kept = loss(microbatch, hidden)
            return total / count, kept

        return run(mini_batch, microbatches, loss if forward_only else mean, forward_only=forward_only)

    backend.schedule.run = averaging
    yield


@contextlib.contextmanager
def _context_offset(backend: MegatronBackend, layer: int) -> Iterator[None]:
    topology = backend.topology
    if topology.context_size == 1:
        raise _refuse(
            "context_offset", "parallel.context=1 has one rank that holds every position", "give parallel.context=2"
        )
    original = rope_utils._get_thd_freqs_on_this_cp_rank

    def one_further(rank, size, x, freqs, *rest):
        return original(rank, size, x, torch.roll(freqs, -1, dims=0) if rank == size - 1 else freqs, *rest)

    true_angles = PackedRotary.forward

    def angles_one_further(self, position_ids: torch.Tensor, *given, **named) -> torch.Tensor:
        return true_angles(self, position_ids + (topology.context_rank == topology.context_size - 1), *given, **named)

    # Transformer Engine's layers take their angles from Megatron-Core's table, torch's from model/rotary.py.
    rope_utils._get_thd_freqs_on_this_cp_rank = one_further
    PackedRotary.forward = angles_one_further
    try:
        yield
    finally:
        rope_utils._get_thd_freqs_on_this_cp_rank = original
        PackedRotary.forward = true_angles


@contextlib.contextmanager
def _other_plan(backend: MegatronBackend, layer: int) -> Iterator[None]:
    if dist.get_world_size() == 1:
        raise _refuse(
            "other_plan", "a world of one process has no other rank to differ from", "start two processes or more"
        )
    plan_training = backend.plan_training

    def its_own(batch, signal: np.ndarray, *, drops: bool):
        without_the_first = signal & (np.arange(len(signal)) != np.flatnonzero(signal)[0])
        return plan_training(batch, without_the_first, drops=True)

    if backend.topology.rank == backend.topology.world_size - 1:
        backend.plan_training = its_own
    yield

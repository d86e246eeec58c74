"""The interfaces of a backend's optional features: parts, observers of passes, keepers of reference weights.

A part is an object that adds one feature to a model's passes, such as the replay of routed experts.
backend/build.py chooses the parts and the keeper. A run neither imports nor calls one that it does
not use.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from megatron_rl.backend.batch import Batch
from megatron_rl.backend.packing import PackedMicroBatch, PackingPart
from megatron_rl.types import BatchFacts, BatchPlan


class Recorded(Protocol):
    """Holds the data that a BackendPart recorded in a log-prob pass, for the samples that this rank owns."""

    def given_to(self, batch: Batch) -> Batch:
        """Return ``batch`` with the recorded data put into its samples, where optimizer steps read it."""


class Recording(Protocol):
    """Holds what a BackendPart, an optional feature of the model, recorded in one log-prob pass on this rank's tokens.

    Example: the experts that each router chose.
    """

    def gather(self, batch: Batch, plan: BatchPlan) -> Recorded:
        """Exchange what the ranks recorded in the pass; return the data of this rank's own samples. A collective."""


class BackendPart(PackingPart, Protocol):
    """Adds an optional feature to a model: it may pack data, wrap passes, record data and sum up metrics.

    No method is a collective unless its docstring says so.

    every_stage: whether every pipeline stage needs the samples' tokens, not only the first and the
        last.
    records: whether the part records data in log-prob passes.
    """

    every_stage: bool
    records: bool

    def check(self, facts: BatchFacts) -> None:
        """Raise ValueError, on every rank alike, if a sample of a rollout lacks data that the part needs."""

    def running(self) -> AbstractContextManager[None]:
        """Return the context that stays open while the schedule runs all micro-batches of one pass."""

    def forward(self, chunk: int, microbatch: PackedMicroBatch, *, trains: bool) -> AbstractContextManager[None]:
        """Return the context that stays open during the forward pass of a micro-batch through one model chunk.

        chunk: the chunk's index on this rank.
        trains: whether a backward pass follows.
        """

    def recording(self) -> AbstractContextManager[Recording]:
        """Return the context that stays open during a log-prob pass; entering it gives the pass's Recording."""

    def take_sums(self) -> dict[str, float]:
        """Return {metric: sum over all ranks} of the current optimizer step, and set the sums to zero. A collective."""

    def forget_sums(self) -> None:
        """Set the sums of the current optimizer step to zero."""


class PassWatch(Protocol):
    """Observes a model's passes, as a profiler does, and changes no number. No method is a collective.

    Each method returns a context that observes the work that the schedule does inside it. A rank runs
    the forward passes of one model chunk in the order of the micro-batches.
    """

    def running(self, num_microbatches: int, *, trains: bool) -> AbstractContextManager[None]:
        """Return a context that observes one run of the schedule over ``num_microbatches`` micro-batches.

        trains: whether backward passes are run too.
        """

    def forward(self, chunk: int, microbatch: PackedMicroBatch) -> AbstractContextManager[None]:
        """Return a context that observes ``microbatch``'s forward pass through the model chunk with index ``chunk``."""

    def loss(self) -> AbstractContextManager[None]:
        """Return a context that observes the computation of the next micro-batch's loss."""

    def backward(self) -> AbstractContextManager[None]:
        """Return a context that observes the next backward pass, in the order that planning/timeline.py gives."""


class ReferenceWeights(Protocol):
    """Keeps a model's reference weights.

    tensors: a copy of each trained parameter, model chunk by model chunk; None before ``keep``.
    """

    @property
    def tensors(self) -> Sequence[torch.Tensor] | None: ...

    def keep(self) -> None:
        """Make the model's current weights the reference. A collective."""

    def reading(self) -> AbstractContextManager[None]:
        """Return a context within which the model's passes use the reference weights."""

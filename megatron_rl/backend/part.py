"""The backend's seams: parts, watches, and the keeper of the reference weights.

backend/build.py chooses parts and keeper. A run neither imports nor calls a part that it does not
use.
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
    """Holds a part's records of a log-prob pass, gathered, for the updates after the pass."""

    def given_to(self, batch: Batch) -> Batch:
        """Return the batch with the records put into its samples."""


class Recording(Protocol):
    """Holds a part's records of one pass on this rank."""

    def gather(self, batch: Batch, plan: BatchPlan) -> Recorded:
        """Bring every rank's records to the ranks that own the samples. A collective."""


class BackendPart(PackingPart, Protocol):
    """Takes part in a model's passes: packs with each micro-batch, wraps passes, records, and sums.

    No method is a collective unless its docstring says so.
    every_stage: whether the part needs the samples' rows on every stage, not only on the first and
        the last.
    records: whether the part records log-prob passes.
    """

    every_stage: bool
    records: bool

    def check(self, facts: BatchFacts) -> None:
        """Raise ValueError, on every rank alike, for a rollout's sample that the part cannot use."""

    def running(self) -> AbstractContextManager[None]:
        """Return the block to hold open during one run of the schedule."""

    def forward(self, chunk: int, microbatch: PackedMicroBatch, *, trains: bool) -> AbstractContextManager[None]:
        """Return the block to hold open during one chunk's forward pass of a micro-batch."""

    def recording(self) -> AbstractContextManager[Recording]:
        """Return the block to hold open during a log-prob pass that is recorded."""

    def take_sums(self) -> dict[str, float]:
        """Return the part's sums of an optimizer step over all ranks, and set them to zero. A collective."""

    def forget_sums(self) -> None:
        """Drop the sums of the current step."""


class PassWatch(Protocol):
    """Watches a model's passes without changing their numbers; a profile is one. No method is a collective.

    Each method returns a block that is held open during the named work. A rank runs the forwards of
    one chunk in the order of the micro-batches.
    """

    def running(self, num_microbatches: int, *, trains: bool) -> AbstractContextManager[None]:
        """Return the block of one run of the schedule."""

    def forward(self, chunk: int, microbatch: PackedMicroBatch) -> AbstractContextManager[None]:
        """Return the block of one chunk's forward pass of a micro-batch."""

    def loss(self) -> AbstractContextManager[None]:
        """Return the block of the next micro-batch's loss."""

    def backward(self) -> AbstractContextManager[None]:
        """Return the block of the next backward pass, in the schedule's order (planning/timeline.py)."""


class ReferenceWeights(Protocol):
    """Keeps a model's reference weights.

    tensors: a copy of each trained parameter, chunk by chunk; None before ``keep``.
    """

    @property
    def tensors(self) -> Sequence[torch.Tensor] | None: ...

    def keep(self) -> None:
        """Make the model's current weights the reference. A collective."""

    def reading(self) -> AbstractContextManager[None]:
        """Return a block within which the model's passes read the reference."""

"""The backend's seams: parts, which take part in the passes of a model, and what keeps its reference weights.

backend/build.py chooses them. A run without one neither imports it nor calls it.
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
    """Holds what a part recorded in a log-prob pass, for the updates after it."""

    def given_to(self, batch: Batch) -> Batch:
        """Return the batch with what was recorded in its samples."""


class Recording(Protocol):
    """Holds what this rank recorded in one pass."""

    def gather(self, batch: Batch, plan: BatchPlan) -> Recorded:
        """Bring what every rank recorded to the ranks that own the samples. A collective."""


class BackendPart(PackingPart, Protocol):
    """Takes part in a model's passes; no method is a collective unless it says so.

    every_stage: whether it packs on the stages between the first and the last too, which then get
        the rows.
    records: whether log-prob passes are recorded.
    """

    every_stage: bool
    records: bool

    def check(self, facts: BatchFacts) -> None:
        """Raise ValueError, on every rank alike, for a sample of a rollout that the part cannot use."""

    def running(self) -> AbstractContextManager[None]:
        """Return a block around the passes of a plan's step."""

    def forward(self, chunk: int, microbatch: PackedMicroBatch, *, trains: bool) -> AbstractContextManager[None]:
        """Return a block around one chunk's forward pass of a micro-batch."""

    def recording(self) -> AbstractContextManager[Recording]:
        """Return a block around a log-prob pass that is recorded."""

    def take_sums(self) -> dict[str, float]:
        """Return the part's sums of an optimizer step over all ranks, and begin anew. A collective."""

    def forget_sums(self) -> None:
        """Drop the sums of the current step."""


class PassWatch(Protocol):
    """Watches a model's passes and leaves their numbers alone, as a profile does. No method is a collective.

    Each method returns a block around what it names; a rank's forwards of one chunk come in the
    order of the micro-batches.
    """

    def running(self, num_microbatches: int, *, trains: bool) -> AbstractContextManager[None]:
        """Return a block around the passes of a plan's step."""

    def forward(self, chunk: int, microbatch: PackedMicroBatch) -> AbstractContextManager[None]:
        """Return a block around one chunk's forward pass of a micro-batch."""

    def loss(self) -> AbstractContextManager[None]:
        """Return a block around the loss of the next micro-batch."""

    def backward(self) -> AbstractContextManager[None]:
        """Return a block around the next backward pass, in the schedule's order (planning/timeline.py)."""


class ReferenceWeights(Protocol):
    """Keeps a model's reference weights.

    tensors: a copy of each trained parameter, chunk by chunk; None before ``keep``.
    """

    @property
    def tensors(self) -> Sequence[torch.Tensor] | None: ...

    def keep(self) -> None:
        """Make the model's current weights the reference. A collective."""

    def reading(self) -> AbstractContextManager[None]:
        """Return a block in which the model's passes read the reference."""

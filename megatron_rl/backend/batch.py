"""A batch of samples: the facts of all on every rank, the rows where they are needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.types import BatchFacts, Sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Holds the samples of all ranks.

    facts: the facts of every sample, on every rank.
    local: the rows that this rank produced.
    rows:  by sample index, the rows that this rank's micro-batches of a plan need (``TrainableModel.fetch_rows``).
    """

    facts: BatchFacts
    local: Sequence[Sample]
    rows: Mapping[int, Sample] = dataclasses.field(default_factory=dict)

"""A batch of samples: the facts of all on every rank, the rows where they are needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.types import BatchFacts, Sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Holds the samples of all ranks.

    facts: the facts of every sample, on every rank.
    local: the rows that this rank produced.
    rows:  by sample index, the rows that this rank's micro-batches of a plan need
           (``TrainableModel.fetch_rows``).
    """

    facts: BatchFacts
    local: Sequence[Sample]
    rows: Mapping[int, Sample] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSample(Sample):
    """Holds a row that names the tokens whose log-probs are taken after each of its tokens, in place of the next one.

    targets: int64 [response, K], K targets at each place of the response.

    Example: after the prompt 5 the tokens 7 and 9 (K = 2), then after the response's token 7 the
    tokens 3 and 4: ``token_ids=[5, 7, 0], prompt_tokens=1, targets=[[7, 9], [3, 4]]``; its last
    token id is read by nobody.
    """

    targets: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetFacts(BatchFacts):
    """Holds the facts of a batch some of whose rows are TargetSamples.

    targets_per_token: int64 [S], K of each sample; its K targets of a token lie side by side in
        flat arrays.
    """

    targets_per_token: np.ndarray

    @property
    def response_offsets(self) -> np.ndarray:
        """Return [S + 1] int64: each sample's start in a flat array over all targets of the batch."""
        return np.concatenate([[0], np.cumsum(self.response_tokens * self.targets_per_token)])


def targets_at(row: Sample, places: np.ndarray) -> np.ndarray:
    """Return int64 [N, K], the targets at N places of a row's response: its own tokens, unless it names others."""
    if isinstance(row, TargetSample):
        return row.targets[places]
    return row.token_ids[row.prompt_tokens + places][:, None]

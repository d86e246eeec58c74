"""A batch of samples: every rank holds all samples' lengths and owners, and the contents of those that it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.types import BatchFacts, Sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Holds a batch of all ranks' samples.

    facts: the lengths, groups and owning ranks of every sample; each rank holds them.
    local: the samples that this rank produced.
    rows:  sample index → sample, for those that this rank's micro-batches of a plan need
           (``TrainableModel.fetch_rows``).
    """

    facts: BatchFacts
    local: Sequence[Sample]
    rows: Mapping[int, Sample] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSample(Sample):
    """Holds a sample for which, at each response token, the log-probs of K given tokens are computed.

    For a plain Sample it is one log-prob, of the response's own token.

    targets: int64 [response, K].

    Example with K = 2: the log-probs of 7 and 9 after the prompt 5, then of 3 and 4 after the
    response's token 7: ``token_ids=[5, 7, 0], prompt_tokens=1, targets=[[7, 9], [3, 4]]``. The last
    token id is not read.
    """

    targets: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetFacts(BatchFacts):
    """Holds the BatchFacts (lengths, groups, owners) of a batch in which some samples are TargetSamples.

    At each response token of a TargetSample, the log-probs of K given tokens (targets) are computed.

    targets_per_token: int64 [S], the number K of each sample; 1 for a plain Sample. In arrays over all
        response tokens, a token's K targets are adjacent.
    """

    targets_per_token: np.ndarray

    @property
    def response_offsets(self) -> np.ndarray:
        """Return int64 [S + 1]: the index of each sample's first target in an array over all targets."""
        return np.concatenate([[0], np.cumsum(self.response_tokens * self.targets_per_token)])


def targets_at(row: Sample, places: np.ndarray) -> np.ndarray:
    """Return int64 [N, K], the tokens whose log-probs are computed at N positions of a sample's response.

    For a TargetSample they are its K targets, for a plain Sample the response's own tokens (K = 1).

    row: the sample.
    places: int64 [N], the positions, from 0 at the response's first token.
    """
    if isinstance(row, TargetSample):
        return row.targets[places]
    return row.token_ids[row.prompt_tokens + places][:, None]

"""Tables of routed experts for this rank's routers: built from samples, and turned back into samples' experts.

A table has a row for each packed token that this rank's routers see. Under context parallelism
these tokens are the rank's chunks of every sequence. Under sequence parallelism they are one slice
of the chunks. A row of −1 stands for a pad, or for a token whose experts are not known: the router
chooses there. If samples share a prompt, the prompt's experts come from the first sample that knows
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.backend.batch import Batch
from megatron_rl.distributed.platform import HOST
from megatron_rl.model.attention.layout import Layout
from megatron_rl.types import Sample

REDUCED_BYTES = 64 * 2**20  # about the size of one reduction of recorded experts


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRows:
    """Describes this rank's routers and the packed tokens that they see.

    layers: the number of each router's layer in the whole model, from 0.
    num_layers: the number of layers of the whole model.
    top_k: experts per token.
    slice_rank, slices: under sequence parallelism, which slice of a micro-batch's tokens this
        rank's routers see, and the number of slices; 0 and 1 without it.
    """

    layers: tuple[int, ...]
    num_layers: int
    top_k: int
    slice_rank: int = 0
    slices: int = 1

    def of(self, positions: np.ndarray) -> np.ndarray:
        """Return the slice of ``positions`` that this rank's routers see.

        positions: int64, the positions in the packed micro-batch that this context rank holds.
        """
        rows = len(positions) // self.slices
        return positions[self.slice_rank * rows : (self.slice_rank + 1) * rows]


def token_places(layout: Layout, slot: int, prompt: int, read: int) -> np.ndarray:
    """Return int64 [prompt + read], the positions of a sample's tokens in the packed micro-batch.

    The prompt's tokens come first, then the response's.

    layout: the positions of all samples of the micro-batch.
    slot: the sample's index in the micro-batch.
    prompt, read: the numbers of prompt tokens and of response tokens that the model reads.
    """
    first, response = int(layout.prompts[slot]), int(layout.responses[slot])
    return np.concatenate([first + np.arange(prompt), response + np.arange(read)])


def lay_experts(
    layout: Layout, samples: Sequence[Sample], read: np.ndarray, positions: np.ndarray, rows: RouterRows
) -> np.ndarray | None:
    """Return the expert numbers to replay in a micro-batch, int16 [this rank's routers, tokens that they see, top_k].

    Returns None if no sample has recorded expert numbers (``routed_experts``).

    layout: the positions of all samples of the micro-batch.
    samples: the K samples of the micro-batch.
    read: int64 [K], how many response tokens of each sample the model reads.
    positions: int64, the positions in the micro-batch that this context rank holds.
    rows: this rank's routers.
    """
    if all(sample.routed_experts is None for sample in samples):
        return None
    table = np.full((layout.num_tokens, len(rows.layers), rows.top_k), -1, dtype=np.int16)
    for slot in reversed(range(len(samples))):  # of samples that share a prompt, the first is laid last and wins
        sample = samples[slot]
        if sample.routed_experts is None:
            continue
        places = token_places(layout, slot, sample.prompt_tokens, int(read[slot]))
        experts = sample.routed_experts[: len(places)][:, list(rows.layers)]
        known = experts[..., 0] >= 0
        table[places] = np.where(known[..., None], experts, table[places])
    return np.ascontiguousarray(table[rows.of(positions)].transpose(1, 0, 2))


def read_experts(
    recorded: Mapping[int, torch.Tensor],
    layout: Layout,
    places: Sequence[np.ndarray],
    positions: np.ndarray,
    rows: RouterRows,
) -> list[np.ndarray]:
    """Return the experts that this rank's routers chose, for each sample int16 [tokens, num_layers, top_k].

    The tokens are at ``places``, in order; −1 stands for tokens and layers of other ranks.

    recorded: index in ``rows.layers`` → experts, int64 [tokens that the router saw, top_k].
    layout: the positions of all samples of the micro-batch.
    places: each sample's token positions in the packed micro-batch (``token_places``).
    positions: int64, the positions in the micro-batch that this context rank holds.
    rows: this rank's routers.
    """
    table = np.full((layout.num_tokens, rows.num_layers, rows.top_k), -1, dtype=np.int16)
    own = rows.of(positions)
    for index, experts in recorded.items():
        table[own, rows.layers[index]] = experts.cpu().numpy().astype(np.int16)
    return [table[found] for found in places]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedExperts:
    """Holds the experts that the routers chose in a log-prob pass.

    passed: bool [S], the batch's samples that ran in the pass; the same on every rank.
    shape:  (layers, top_k) of the whole model.
    own:    index in ``Batch.local`` → int16 [tokens, layers, top_k], for the samples that this rank
            owns.
    """

    passed: np.ndarray
    shape: tuple[int, int]
    own: Mapping[int, np.ndarray]

    def given_to(self, batch: Batch) -> Batch:
        """Return ``batch`` with the recorded experts in its samples; samples that were not in the pass get none."""
        local = [dataclasses.replace(sample, routed_experts=self.own.get(i)) for i, sample in enumerate(batch.local)]
        shapes = np.where(self.passed[:, None], np.array(self.shape), 0)
        facts = dataclasses.replace(batch.facts, routed_shapes=shapes if self.passed.any() else None)
        return dataclasses.replace(batch, facts=facts, local=local)


def gather_recorded(
    batch: Batch, parts: Mapping[int, np.ndarray], passed: np.ndarray, rows: RouterRows, rank: int
) -> RecordedExperts:
    """Exchange the tokens' recorded expert numbers; return those of the samples that this rank owns. A collective.

    parts: sample index → the expert numbers that this rank recorded (``read_experts``).
    passed: bool [S], the batch's samples that were in the log-prob pass.
    rows: this rank's routers.
    rank: this rank's global number.

    Only one rank records a token's experts in a layer, so a sum over ranks puts them together.
    """
    facts, own = batch.facts, {}
    tokens = facts.total_tokens
    for chosen in _chunks(np.flatnonzero(passed), tokens, 2 * rows.num_layers * rows.top_k):
        starts = np.cumsum([0, *tokens[chosen]])
        summed = np.zeros((int(starts[-1]), rows.num_layers, rows.top_k), dtype=np.int16)
        for start, sample in zip(starts, chosen.tolist(), strict=False):
            if sample in parts:
                summed[start : start + len(parts[sample])] = parts[sample] + 1
        flat = np.concatenate([summed.reshape(-1), np.zeros(summed.size % 2, dtype=np.int16)])
        # NCCL has no int16 sum; as int32, a pair's low half cannot carry into the high one: one term is not 0
        words = torch.from_numpy(flat.view(np.int32)).to(HOST.device)
        dist.all_reduce(words)
        summed = words.cpu().numpy().view(np.int16)[: summed.size].reshape(summed.shape) - np.int16(1)
        for start, stop, sample in zip(starts[:-1], starts[1:], chosen.tolist(), strict=True):
            if facts.owners[sample] == rank:
                own[int(facts.owner_rows[sample])] = summed[start:stop]
    return RecordedExperts(passed=passed, shape=(rows.num_layers, rows.top_k), own=own)


def _chunks(samples: np.ndarray, tokens: np.ndarray, bytes_per_token: int) -> Iterator[np.ndarray]:
    """Cut ``samples`` into arrays of consecutive entries, and yield each array.

    The recorded expert numbers of an array's samples take about ``REDUCED_BYTES`` (64 MiB) together.
    Each array has at least one sample.

    samples: the samples' indices in the batch.
    tokens: [S], the number of tokens of every sample of the batch.
    bytes_per_token: the bytes of one token's expert numbers.
    """
    part = np.cumsum(tokens[samples] * bytes_per_token) // REDUCED_BYTES
    for number in np.unique(part):
        yield samples[part == number]

"""Routed experts of samples ↔ tables for the routers of this rank, row by row of a packed micro-batch.

A router sees the rows that its rank holds: of a packed micro-batch, under context parallelism its
chunks of every sequence, under sequence parallelism one slice of those. Rows of pads, and of tokens
whose experts are not known, hold −1: the router chooses there. Of a prompt that samples share, the
first sample that knows a token's experts gives them.
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

REDUCED_BYTES = 64 * 2**20  # of one reduction of recorded experts


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRows:
    """Names what this rank's routers see.

    layers: the number of each router's layer in the whole model, from 0; num_layers: of the whole
        model.
    top_k: experts per token.
    slice_rank, slices: this rank among those that split a micro-batch's rows (sequence
        parallelism); 0 and 1 without.
    """

    layers: tuple[int, ...]
    num_layers: int
    top_k: int
    slice_rank: int = 0
    slices: int = 1

    def of(self, positions: np.ndarray) -> np.ndarray:
        """Return the positions of this rank's slice, of those that its context rank holds."""
        rows = len(positions) // self.slices
        return positions[self.slice_rank * rows : (self.slice_rank + 1) * rows]


def token_places(layout: Layout, slot: int, prompt: int, read: int) -> np.ndarray:
    """Return int64 [prompt + read], the places of a sample's tokens that run: prompt's, then response's."""
    first, response = int(layout.prompts[slot]), int(layout.responses[slot])
    return np.concatenate([first + np.arange(prompt), response + np.arange(read)])


def lay_experts(
    layout: Layout, samples: Sequence[Sample], read: np.ndarray, positions: np.ndarray, rows: RouterRows
) -> np.ndarray | None:
    """Return int16 [layers of this rank, its rows, top_k]; None where no sample has experts.

    read: int64 [K], the response tokens that run. positions: [T], the places that this context rank
        holds.
    """
    if all(sample.routed_experts is None for sample in samples):
        return None
    table = np.full((layout.num_tokens, len(rows.layers), rows.top_k), -1, dtype=np.int16)
    for slot in reversed(range(len(samples))):  # the first one of a shared prompt is laid last
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
    """Return for each sample int16 [tokens that ran, num_layers, top_k]; −1 where another rank has seen the token.

    recorded: by index among ``rows.layers``, int64 [rows, top_k]. places: of each sample, see
        ``token_places``.
    """
    table = np.full((layout.num_tokens, rows.num_layers, rows.top_k), -1, dtype=np.int16)
    own = rows.of(positions)
    for index, experts in recorded.items():
        table[own, rows.layers[index]] = experts.cpu().numpy().astype(np.int16)
    return [table[found] for found in places]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedExperts:
    """Holds the experts that a log-prob pass has chosen.

    passed: bool [S], the samples of the batch that it ran, on every rank.
    shape:  (layers, top_k) of the whole model.
    own:    of this rank's own samples, by their place among ``Batch.local``: int16 [tokens, layers,
            top_k].
    """

    passed: np.ndarray
    shape: tuple[int, int]
    own: Mapping[int, np.ndarray]

    def given_to(self, batch: Batch) -> Batch:
        """Return the batch with these experts in its samples; the others have none."""
        local = [dataclasses.replace(sample, routed_experts=self.own.get(i)) for i, sample in enumerate(batch.local)]
        shapes = np.where(self.passed[:, None], np.array(self.shape), 0)
        facts = dataclasses.replace(batch.facts, routed_shapes=shapes if self.passed.any() else None)
        return dataclasses.replace(batch, facts=facts, local=local)


def gather_recorded(
    batch: Batch, parts: Mapping[int, np.ndarray], passed: np.ndarray, rows: RouterRows, rank: int
) -> RecordedExperts:
    """Bring what every rank has recorded to the ranks that own the samples. A collective.

    parts: by sample, what this rank recorded (``read_experts``). passed: bool [S].

    No token's experts of a layer are recorded by two ranks, so that sums put them together.
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
        words = torch.from_numpy(flat.view(np.int32)).to(HOST.device)  # NCCL adds no int16; nothing carries over
        dist.all_reduce(words)
        summed = words.cpu().numpy().view(np.int16)[: summed.size].reshape(summed.shape) - np.int16(1)
        for start, stop, sample in zip(starts[:-1], starts[1:], chosen.tolist(), strict=True):
            if facts.owners[sample] == rank:
                own[int(facts.owner_rows[sample])] = summed[start:stop]
    return RecordedExperts(passed=passed, shape=(rows.num_layers, rows.top_k), own=own)


def _chunks(samples: np.ndarray, tokens: np.ndarray, bytes_per_token: int) -> Iterator[np.ndarray]:
    """Yield samples in their order, in parts of about ``REDUCED_BYTES``; each has at least one."""
    part = np.cumsum(tokens[samples] * bytes_per_token) // REDUCED_BYTES
    for number in np.unique(part):
        yield samples[part == number]

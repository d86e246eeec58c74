"""The weight matrices that Muon makes orthogonal, as they lie in Megatron-Core's parameters.

A matrix is one linear map: q, k, v, gate, up and each expert are matrices of their own, although
Megatron-Core joins them. So are the parts of a delta net's projection that ``Entry.sections`` names.
Whether a checkpoint's file joins them too makes no difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from megatron_rl.weights.entry import Entry, Layout
from megatron_rl.weights.mapping import hf_parts, hf_size
from megatron_rl.weights.model_shape import ModelShape

ROUTER = "mlp.router.weight"


def is_matrix(entry: Entry, shape: ModelShape) -> bool:
    """Return whether a parameter holds matrices that Muon steps; AdamW steps any other parameter.

    AdamW's are the embedding, the LM head, the router, vectors, convolutions, and maps to or from one
    number (a value head, the gate of a shared expert).
    """
    size = hf_size(shape, entry.hf[0])
    return (
        len(size) == 2
        and min(size) > 1
        and entry.layout is not Layout.ROWS
        and not entry.frozen
        and not entry.megatron.endswith(ROUTER)
    )


def matrices(entry: Entry, shape: ModelShape, shards: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a view of ``shards`` for each matrix of a parameter.

    A view has three dimensions or more. Its last dimension is the matrix's columns, unless the
    layout splits columns; ``flat_rows`` says how it becomes [rows, columns].

    entry: an entry for which ``is_matrix`` is true.
    shards: [ranks, *shard], the shards of all tensor ranks.
    """
    match entry.layout:
        case Layout.GATE_UP | Layout.INTERLEAVED:
            count = 2 if entry.joined or entry.layout is Layout.INTERLEAVED else len(entry.hf)
            yield from shards.unflatten(1, (count, -1)).unbind(1)
        case Layout.COLUMNS | Layout.TRANSPOSED:
            yield shards.transpose(0, 1)
        case _:
            yield from itertools.chain.from_iterable(parts for _, parts in hf_parts(entry, shape, shards))


def flat_rows(entry: Entry, view: torch.Tensor) -> torch.Tensor:
    """Return a view that ``matrices`` yields as [rows, columns], copied if its elements lie out of order."""
    if entry.layout in (Layout.COLUMNS, Layout.TRANSPOSED):
        return view.flatten(1)
    return view.reshape(-1, view.shape[-1])

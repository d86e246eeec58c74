"""The keys that each query sees, by position in its sequence: in a packed micro-batch, or in a step with a cache.

model/invariant/attention.py reads these keys in blocks, for a few queries of one sequence at a
time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.model.attention.layout import Layout

KEY_BLOCK = 64  # positions of one block of keys
QUERIES = 8  # queries of one sequence that are computed together: a group
ITEMS = 16  # groups that one matrix product computes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sight:
    """Describes which rows of the key tensor each query sees.

    The queries are divided into I groups, each of QUERIES queries of one sequence. Dummy queries fill
    up a group with fewer queries. Dummy groups make I a multiple of ITEMS, the number of groups that
    one matrix product computes. Query q of group i sees ``keys[first[i] : first[i] + seen[i, q]]``.

    queries: int64 [I, QUERIES], rows of the query tensor; 0 for a dummy.
    real: bool [I, QUERIES], False for a dummy.
    seen: int64 [I, QUERIES], how many keys the query sees, from its sequence's first key on; at
        least 1.
    keys: int64 [K], rows of the key tensor, one sequence after the other, each in the order of
        positions.
    first: int64 [I], the index in ``keys`` where the group's sequence begins.
    """

    queries: torch.Tensor
    real: torch.Tensor
    seen: torch.Tensor
    keys: torch.Tensor
    first: torch.Tensor

    @classmethod
    def of(cls, parts: Iterable[tuple[np.ndarray, int, np.ndarray]]) -> Sight:
        """Return the ``Sight`` of sequences in which the query at position p sees the keys of positions 0 to p.

        parts: (rows, first, keys) for each sequence. ``rows``: its rows of the query tensor.
            ``first``: the position of the first of these queries. ``keys``: its rows of the key
            tensor, in the order of positions.
        """
        items: list[tuple[np.ndarray, np.ndarray, int]] = []
        sequences: list[np.ndarray] = []
        begin = 0
        for rows, first, keys in parts:
            for start in range(0, len(rows), QUERIES):
                own = rows[start : start + QUERIES]
                items.append((own, first + start + 1 + np.arange(len(own)), begin))
            sequences.append(keys)
            begin += len(keys)
        items.sort(key=lambda item: item[1][-1])  # groups that see about as many keys share a product
        count = -(-len(items) // ITEMS) * ITEMS
        queries, real = np.zeros((count, QUERIES), dtype=np.int64), np.zeros((count, QUERIES), dtype=bool)
        seen_by, begins = np.ones((count, QUERIES), dtype=np.int64), np.zeros(count, dtype=np.int64)
        for i, (own, seen, begin) in enumerate(items):
            queries[i, : len(own)], real[i, : len(own)], seen_by[i, : len(own)] = own, True, seen
            begins[i] = begin
        arrays = dict(queries=queries, real=real, seen=seen_by, keys=np.concatenate(sequences), first=begins)
        return cls(**{name: torch.from_numpy(array) for name, array in arrays.items()})

    def key_rows(self, part: slice) -> torch.Tensor:
        """Return, for each group in the slice ``part``, which rows of the key tensor it may see, ordered by position.

        A group is QUERIES queries of one sequence. The result is int64 [groups, n], where n is a
        multiple of KEY_BLOCK. It has 0 after the last key that a group sees. Let ``part`` select the
        ITEMS groups of one matrix product: for all groups the result would be about as large as
        queries times keys.
        """
        last = self.seen[part].amax(1, keepdim=True)
        width = -(-int(last.max()) // KEY_BLOCK) * KEY_BLOCK
        positions = torch.arange(width)[None]
        places = (self.first[part][:, None] + positions).clamp(max=len(self.keys) - 1)
        return torch.where(positions < last, self.keys[places], 0)

    @classmethod
    def of_layout(cls, layout: Layout) -> Sight:
        """Return the ``Sight`` of a packed micro-batch.

        A response to a shared prompt sees the prompt's keys, then its own.
        """
        starts = layout.starts
        prompts = {
            segment: np.arange(starts[prompt.segment], starts[prompt.segment] + prompt.tokens)
            for prompt in layout.shared
            for segment in layout.responses_of(prompt)
        }
        nothing = np.zeros(0, dtype=np.int64)
        parts = []
        for segment, (length, offset) in enumerate(zip(layout.lengths, layout.offsets, strict=True)):
            own = np.arange(starts[segment], starts[segment] + length)
            parts.append((own, offset, np.concatenate([prompts.get(segment, nothing), own])))
        return cls.of(parts)

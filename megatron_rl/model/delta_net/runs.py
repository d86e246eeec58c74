"""Lays out a micro-batch for a gated delta net: its sequences' chunks, what each continues, and the tokens before.

A delta net's state after a token depends on all earlier tokens of its sequence. A run is a segment's
tokens without the pads that responses to a shared prompt do not see. A run begins with a state of
zeros, or, as a response to a shared prompt, with the state after the prompt's last token. So a prompt
runs once, and its state is forked to each response, with the gradients of all of them flowing back.

Runs are cut in chunks of C tokens; the last chunk of a run is filled up with rows of zeros, which
change nothing (k = 0, β = 0, decay 1). Chunks at the same depth, that is with equally many chunks
before them in their sequence, are computed together, all runs at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from megatron_rl.distributed.platform import send
from megatron_rl.model.attention.layout import Layout
from megatron_rl.weights.model_shape import DELTA_CHUNK

LEAST_CHUNK = 16


class Run(NamedTuple):
    """Locates a run of tokens of one sequence.

    start: the index of its first token in the micro-batch.
    tokens: how many tokens it has.
    parent: the index of the run that it continues; −1 for none.
    """

    start: int
    tokens: int
    parent: int


def runs_of(layout: Layout) -> list[Run]:
    """Return the runs of a micro-batch, one for each segment, in order.

    Example: a prompt of 3 tokens, padded to 4, with responses of 2 and 1 tokens →
    ``[Run(0, 3, -1), Run(4, 2, 0), Run(6, 1, 0)]``.
    """
    starts = layout.starts.tolist()
    tokens, parents = list(layout.lengths), [-1] * len(layout.lengths)
    for prompt in layout.shared:
        tokens[prompt.segment] = prompt.tokens
        for response in layout.responses_of(prompt):
            parents[response] = prompt.segment
    return [Run(*each) for each in zip(starts, tokens, parents)]  # noqa: B905 (starts has one item more)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Taken:
    """Copies rows into other places: ``out[into] = rows[source]``, and zeros elsewhere. No row is taken twice.

    source, into: int64 [n], the indices of the rows, and their places.
    size: the number of rows of the result.
    """

    source: torch.Tensor
    into: torch.Tensor
    size: int

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [size, …] of ``rows`` [T, …]."""
        return _Take.apply(rows, self.source, self.into, self.size)

    def gathered(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (for each row of the result the index of the row that it copies, the rows that nothing is copied to).

        Rows that nothing is copied to have the index 0.
        """
        return _gathered(self.source, self.into, self.size)

    def back(self, gradient: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the gradient [``rows``, …] of what was copied from, for that of the result."""
        return _copied(gradient, self.into, self.source, rows)


class _Take(torch.autograd.Function):
    """Copies rows to other places; backward copies the gradients back, so no sum depends on an order."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, source: torch.Tensor, into: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(source, into)
        ctx.rows = len(rows)
        return _copied(rows, source, into, size)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        source, into = ctx.saved_tensors
        return _copied(gradient, into, source, ctx.rows), None, None, None


def _copied(rows: torch.Tensor, source: torch.Tensor, into: torch.Tensor, size: int) -> torch.Tensor:
    # as a gather, which passes over the rows once; rows that nothing is copied to are row 0 first, then zeros
    index, empty = _gathered(source, into, size)
    out = rows.index_select(0, index)
    return out.index_fill_(0, empty, 0) if len(empty) else out


def _gathered(source: torch.Tensor, into: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    index = into.new_zeros(size).index_copy_(0, into, source)
    if len(into) == size:
        return index, into[:0]
    is_empty = torch.ones(size, dtype=torch.int8, device=into.device).index_fill_(0, into, 0)
    return index, is_empty.argsort(descending=True, stable=True)[: size - len(into)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class History:
    """Puts the last inputs of each run's parent before the run, for a causal convolution over one row of all runs.

    rows: copies the tokens behind places for what comes before them: K − 1 rows before each run.
    tails: int64 [n], the tokens that a continuing run reads besides its own; tokens of a prompt stand
        once for each response.
    places: int64 [n], their places among the rows.
    """

    rows: Taken
    tails: torch.Tensor
    places: torch.Tensor

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return [rows.size, …] of ``inputs`` [T, …]."""
        laid = self.rows(inputs)
        if not len(self.tails):
            return laid
        return laid.index_put((self.places,), repeated(inputs, self.tails))


def repeated(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows that ``index`` [n] names, each as often as it is named.

    Backward sums the gradients of a row's copies in a fixed order.
    """
    return _Repeat.apply(rows, index)


class _Repeat(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        summed = gradient.new_zeros(ctx.rows, *gradient.shape[1:])
        return summed.index_put_((index,), gradient, accumulate=True), None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunks:
    """Lays the tokens of all runs in chunks, ordered by depth.

    tokens: C, the number of rows of a chunk.
    into: copies the convolution's rows to the chunks' rows [N · C].
    of_tokens: copies the micro-batch's tokens to the chunks' rows.
    back: copies the chunks' rows to the micro-batch's tokens; tokens outside the runs get zeros.
    counts: the number of chunks at each depth; N together.
    parents: for each depth after the first, the chunk's number among those of the depth before that
        its first token continues, int64; None if chunk i continues chunk i.
    """

    tokens: int
    into: Taken
    of_tokens: Taken
    back: Taken
    counts: tuple[int, ...]
    parents: tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wave:
    """Lays the tokens of runs that do not wait for each other end to end.

    rows: copies the convolution's rows to the wave's rows.
    of_tokens: copies the micro-batch's tokens to the wave's rows.
    bounds: int32 [n + 1], the first row of each of n runs, then the number of all rows.
    chunks: int32 [chunks, 2], the run of each chunk of ``DELTA_CHUNK`` tokens, and its number within the run.
    parents: int64 [n], the run of the wave before that each continues; None in the first wave.
    """

    rows: Taken
    of_tokens: Taken
    bounds: torch.Tensor
    chunks: torch.Tensor
    parents: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waves:
    """Holds all runs in one wave, or in two: runs without a parent, then the responses that continue them.

    waves: one wave or two.
    back: copies the rows of all waves, end to end, to the micro-batch's tokens; tokens outside the runs get zeros.
    """

    waves: tuple[Wave, ...]
    back: Taken


@dataclass(frozen=True, kw_only=True, eq=False)
class DeltaLayout:
    """Holds all indices that the gated delta nets of a micro-batch need; those of some kernels alone once asked for.

    runs: where the sequences lie.
    history: lays the tokens for the convolution.
    starts: the place of each run's first token among the convolution's rows.
    tokens: the number of the micro-batch's tokens.
    device: where the indices are.
    """

    runs: tuple[Run, ...]
    history: History
    starts: tuple[int, ...]
    tokens: int
    device: torch.device

    @classmethod
    def of(cls, layout: Layout, before: int, device: torch.device) -> DeltaLayout:
        """Return the indices of a micro-batch, on ``device``.

        before: K − 1, the number of earlier tokens that the convolution reads.
        """
        runs = runs_of(layout)
        history, starts = _history(runs, before, layout.num_tokens, device)
        return cls(runs=tuple(runs), history=history, starts=tuple(starts), tokens=layout.num_tokens, device=device)

    @functools.cached_property
    def chunks(self) -> Chunks:
        """Return how the convolution's rows lie for the delta rule in torch."""
        return _chunks(self.runs, self.starts, self.tokens, self.history.rows.size, self.device)

    @functools.cached_property
    def waves(self) -> Waves:
        """Return how they lie for flash-linear-attention's kernels."""
        return _waves(self)


def _index(values: np.ndarray | Sequence[int], device: torch.device, dtype: type = np.int64) -> torch.Tensor:
    return send(torch.from_numpy(np.asarray(values, dtype=dtype)), device)


def _history(runs: list[Run], before: int, tokens: int, device: torch.device) -> tuple[History, list[int]]:
    """Return (the ``History`` of the runs, the place of each run's first token among its rows)."""
    starts, place = [], 0
    for run in runs:
        starts.append(place + before)
        place += before + run.tokens
    source = np.concatenate([np.arange(run.tokens) + run.start for run in runs])
    into = np.concatenate([np.arange(run.tokens) + start for run, start in zip(runs, starts, strict=True)])
    # the parent's last tokens, the last next to the run
    tails: list[int] = []
    places: list[int] = []
    for run, start in zip(runs, starts, strict=True):
        if run.parent >= 0:
            parent = runs[run.parent]
            found = min(before, parent.tokens)
            tails += range(parent.start + parent.tokens - found, parent.start + parent.tokens)
            places += range(start - found, start)
    rows = Taken(source=_index(source, device), into=_index(into, device), size=place)
    return History(rows=rows, tails=_index(tails, device), places=_index(places, device)), starts


def _chunks(runs: Sequence[Run], starts: Sequence[int], tokens: int, rows: int, device: torch.device) -> Chunks:
    """Return the ``Chunks`` of the runs.

    starts: the place of each run's first token among the convolution's rows.
    tokens: the number of the micro-batch's tokens.
    rows: the number of the convolution's rows.
    """
    longest = max(run.tokens for run in runs)
    width = min(DELTA_CHUNK, max(LEAST_CHUNK, 1 << (longest - 1).bit_length()))
    # (depth, run, number within the run) of every chunk, by depth
    counts = [-(-run.tokens // width) for run in runs]
    first = [0] * len(runs)  # depths; a parent stands before its responses
    for number, run in enumerate(runs):
        first[number] = first[run.parent] + counts[run.parent] if run.parent >= 0 else 0
    by_depth: dict[int, list[tuple[int, int]]] = {}
    order = sorted(range(len(runs)), key=lambda i: -counts[i])  # longer runs first: chunk i mostly continues chunk i
    for number in order:
        for chunk in range(counts[number]):
            by_depth.setdefault(first[number] + chunk, []).append((number, chunk))
    depths = [by_depth[depth] for depth in range(len(by_depth))]
    # the chunk that each continues
    parents: list[torch.Tensor | None] = []
    for earlier, later in zip(depths[:-1], depths[1:], strict=True):
        places = {key: place for place, key in enumerate(earlier)}
        found = [places[run, chunk - 1] if chunk else places.get(_last(runs, counts, run), -1) for run, chunk in later]
        parents.append(None if found == list(range(len(found))) else _index(found, device))
    # rows: the tokens' places
    into, source, back = [], [], []
    for place, (number, chunk) in enumerate(key for depth in depths for key in depth):
        count = min(width, runs[number].tokens - chunk * width)
        into.append(np.arange(count) + place * width)
        source.append(np.arange(count) + starts[number] + chunk * width)
        back.append(np.arange(count) + runs[number].start + chunk * width)
    laid, conv_rows, own = (np.concatenate(x) for x in (into, source, back))
    size = sum(map(len, depths)) * width
    places, token = _index(laid, device), _index(own, device)
    return Chunks(
        tokens=width,
        into=Taken(source=_index(conv_rows, device), into=places, size=size),
        of_tokens=Taken(source=token, into=places, size=size),
        back=Taken(source=places, into=token, size=tokens),
        counts=tuple(map(len, depths)),
        parents=tuple(parents),
    )


def _last(runs: Sequence[Run], counts: list[int], run: int) -> tuple[int, int]:
    """Return (run, chunk) of the last chunk of the run that ``run`` continues."""
    parent = runs[run].parent
    return parent, counts[parent] - 1


def _waves(layout: DeltaLayout) -> Waves:
    """Return the ``Waves`` of a micro-batch."""
    runs, device = layout.runs, layout.device
    first = [i for i, run in enumerate(runs) if run.parent < 0]
    second = [i for i, run in enumerate(runs) if run.parent >= 0]
    place = {number: i for i, number in enumerate(first)}
    assert all(runs[i].parent in place for i in second), "a response continues a response"
    waves, back = [_wave(layout, first, None)], [first]
    if second:
        waves.append(_wave(layout, second, _index([place[runs[i].parent] for i in second], device)))
        back.append(second)
    own = np.concatenate([np.arange(runs[i].tokens) + runs[i].start for numbers in back for i in numbers])
    rows = Taken(source=_index(np.arange(len(own)), device), into=_index(own, device), size=layout.tokens)
    return Waves(waves=tuple(waves), back=rows)


def _wave(layout: DeltaLayout, numbers: Sequence[int], parents: torch.Tensor | None) -> Wave:
    """Return the wave of the runs with these numbers."""
    runs, device = [layout.runs[i] for i in numbers], layout.device
    lengths = [run.tokens for run in runs]
    into = _index(np.arange(sum(lengths)), device)
    source = np.concatenate([np.arange(run.tokens) + layout.starts[i] for i, run in zip(numbers, runs, strict=True)])
    own = np.concatenate([np.arange(run.tokens) + run.start for run in runs])
    chunks = [(number, chunk) for number, count in enumerate(lengths) for chunk in range(-(-count // DELTA_CHUNK))]
    return Wave(
        rows=Taken(source=_index(source, device), into=into, size=sum(lengths)),
        of_tokens=Taken(source=_index(own, device), into=into, size=sum(lengths)),
        bounds=_index(np.cumsum([0, *lengths]), device, np.int32),
        chunks=_index(chunks, device, np.int32),
        parents=parents,
    )

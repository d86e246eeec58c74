"""Tensors of files that stack all experts of a layer ↔ one tensor per expert, the way the package passes them on.

gpt_oss has four such tensors in a layer, ``…mlp.experts.gate_up_proj`` [experts, hidden, 2 · ffn] for one. An expert's
slice goes by ``…mlp.experts.<expert>.gate_up_proj``, a name that vLLM reads too (0.32 ``models/gpt_oss.py``,
``_try_load_streamed_expert``): so nobody holds a stack to load, send or convert an expert.

llama4_text has two, of which an expert's slice is the transpose: gate's columns and then up's, or down's. They go by
``…feed_forward.experts.<expert>.gate_proj.weight`` [ffn, hidden] and so on, as those of a family with a tensor each,
which vLLM reads too (0.32 ``models/llama4.py``, ``load_moe_expert_weights``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from megatron_rl.weights.families.family import ExpertNames
from megatron_rl.weights.families.register import FAMILIES
from megatron_rl.weights.shards import Planned

BLOCKS, SCALES = "_blocks", "_scales"  # ends of the names of a stack in MXFP4 (weights/mxfp4.py)
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.([\w.]+)")


class Slice(NamedTuple):
    """Says where an expert's tensor lies in a stack.

    part, parts: its columns are one of ``parts`` equal shares of the expert's matrix there; 0 and 1 for all of them.
    transposed: whether the tensor is the transpose of what lies there.

    Example: ``Slice("x.experts.gate_up_proj", 3, 1, 2, True)`` is up_proj.weight of expert 3.
    """

    stack: str
    expert: int
    part: int = 0
    parts: int = 1
    transposed: bool = False

    def size(self, stack: Iterable[int]) -> tuple[int, ...]:
        """Return the tensor's size. stack: the stack's."""
        rows, *columns = tuple(stack)[1:]
        return (columns[0] // self.parts, rows) if self.transposed else (rows, *columns)

    def stack_size(self, size: tuple[int, ...], num_experts: int) -> tuple[int, ...]:
        """Return the stack's size, of the tensor's; the inverse of ``size``."""
        return (num_experts, size[1], self.parts * size[0]) if self.transposed else (num_experts, *size)

    def view(self, stack: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of the stack."""
        matrix = stack[self.expert]
        return matrix.chunk(self.parts, dim=1)[self.part].t() if self.transposed else matrix


def stacking(family: object) -> ExpertNames | None:
    """Return the names of a mixture whose files stack its experts; None for any other family."""
    names = FAMILIES[family].experts if isinstance(family, str) and family in FAMILIES else None
    return names if names is not None and names.stacked else None


def is_stack(name: str, names: ExpertNames) -> bool:
    """Return whether a name is a stack's."""
    within, _, last = name.rpartition(".")
    return last in names.stacked and within.endswith(".experts")


def _last_parts(stack: str, names: ExpertNames) -> tuple[str, ...]:
    """Return the last parts of the names of an expert's tensors in a stack, by the last part of the stack's."""
    if not names.transposed:
        return (stack,)
    matrices = (names.gate, names.up) if stack == "gate_up_proj" else (names.down,)
    return tuple(f"{matrix}.weight" for matrix in matrices)


def slices_of(stack: str, expert: int, names: ExpertNames) -> Iterator[tuple[str, Slice]]:
    """Yield the names and places of an expert's tensors in a stack.

    Example: ``x.experts.down_proj`` of gpt_oss, 3 → ``x.experts.3.down_proj``.
    """
    within, _, last = stack.rpartition(".")
    parts = _last_parts(last, names)
    for number, part in enumerate(parts):
        yield f"{within}.{expert}.{part}", Slice(stack, expert, number, len(parts), names.transposed)


def slice_of(name: str, names: ExpertNames | None) -> Slice | None:
    """Return the place of an expert's tensor; None for another name. The inverse of ``slices_of``."""
    found = _EXPERT.fullmatch(name) if names is not None else None
    if found is None:
        return None
    within, expert, last = found.groups()
    for stack in names.stacked:
        if last in _last_parts(stack, names):
            return dict(slices_of(f"{within}.{stack}", int(expert), names))[name]
    return None


def joined_plan(planned: Iterable[Planned], family: str) -> list[Planned]:
    """Return the tensors of files, in order, where some of ``planned`` are experts' slices that come one by one."""
    names = stacking(family)
    found: list[Planned] = []
    for tensor in planned:
        place = slice_of(tensor.name, names)
        if place is None:
            found.append(tensor)
            continue
        parts = place.parts if place.transposed else 0
        if (place.expert, place.part) == (0, 0):
            found.append(replace(tensor, name=place.stack, slices=(), parts=parts))
        last, expected = found[-1], place.expert * place.parts + place.part
        assert last.name == place.stack and len(last.slices) == expected, f"{tensor.name} comes after {last.name}"
        size = place.stack_size(tensor.shape, place.expert + 1)
        found[-1] = replace(last, shape=size, slices=(*last.slices, tensor.name))
    return found


def slices(tensors: Iterable[tuple[str, torch.Tensor]], family: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, and for each stack the views of each expert under their names."""
    names = stacking(family)
    for name, tensor in tensors:
        if names is not None and is_stack(name, names):
            for expert in range(len(tensor)):
                yield from ((own, place.view(tensor)) for own, place in slices_of(name, expert, names))
        else:
            yield name, tensor


def copies(tensors: Iterable[tuple[str, torch.Tensor]], family: str, num_experts: int) -> dict[str, torch.Tensor]:
    """Return copies in host memory under the names of files: experts' slices, in any order, lie in their stacks.

    tensors: each valid until the next one is asked for.
    """
    names = stacking(family)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        place = slice_of(name, names)
        if place is None:
            found[name] = tensor.to("cpu", copy=True)
            continue
        if place.stack not in found:
            found[place.stack] = torch.empty(place.stack_size(tuple(tensor.shape), num_experts), dtype=tensor.dtype)
        place.view(found[place.stack]).copy_(tensor)
    return found


class ExpertOfStack:
    """Reads slices of an expert's tensor in a stack; ``stack``: safetensors' slice of it."""

    def __init__(self, stack, place: Slice):
        self.stack, self.place = stack, place

    def get_shape(self) -> list[int]:
        return list(self.place.size(self.stack.get_shape()))

    def get_dtype(self) -> str:
        return self.stack.get_dtype()

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        index = index if isinstance(index, tuple) else (index,)
        if not self.place.transposed:
            return self.stack[(self.place.expert, *index)]
        size = self.get_shape()
        rows, columns = (slice(*x.indices(n)) for x, n in zip((*index, slice(None))[:2], size, strict=True))
        first = self.place.part * size[0]
        return self.stack[self.place.expert, columns, slice(first + rows.start, first + rows.stop)].t()

"""The mapping between a stack, one tensor of all experts of a layer in a file, and one tensor per expert.

gpt_oss has four stacks in a layer, ``…mlp.experts.gate_up_proj`` [experts, hidden, 2 · ffn] among
them. An expert's slice is called ``…mlp.experts.<expert>.gate_up_proj``, so that no process needs a
whole stack to load, send or convert an expert. vLLM reads this name too (0.32
``models/gpt_oss.py``, ``_try_load_streamed_expert``).

llama4_text has two stacks, which hold an expert's matrices transposed: one has gate's columns and
then up's, the other has down's. An expert's tensors are called
``…feed_forward.experts.<expert>.gate_proj.weight`` [ffn, hidden] and so on, as in a family with one
tensor per expert. vLLM reads these names too (0.32 ``models/llama4.py``,
``load_moe_expert_weights``).

qwen3_5_moe_text has the same two stacks, not transposed: an expert's slice of the first is gate's rows
and then up's. Its files may also hold a tensor per expert, which are read as they are.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from megatron_rl.errors import ConfigError
from megatron_rl.weights.families.family import ExpertNames
from megatron_rl.weights.families.register import stacking
from megatron_rl.weights.mxfp4 import GROUP, PackedExpert
from megatron_rl.weights.shards import Planned

BLOCKS, SCALES = "_blocks", "_scales"  # ends of the names of a stack in MXFP4 (weights/mxfp4.py)
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.([\w.]+)")


class Slice(NamedTuple):
    """Locates an expert's tensor in a stack of experts.

    stack: the stack's name.
    expert: the expert's number, the index in the stack's first dimension.
    part, parts: the expert's rows, or its columns if ``transposed``, are cut into ``parts`` equal
        ranges, and the tensor is range number ``part``, from 0. The defaults (0 of 1) take all.
    transposed: whether the tensor is the transpose of this range.

    Example: ``Slice("x.experts.gate_up_proj", expert=3, part=1, parts=2, transposed=True)`` is
    up_proj.weight of expert 3.
    """

    stack: str
    expert: int
    part: int = 0
    parts: int = 1
    transposed: bool = False

    def size(self, stack: Iterable[int]) -> tuple[int, ...]:
        """Return the shape of the expert's tensor. ``stack``: the shape of the whole stack."""
        rows, *columns = tuple(stack)[1:]
        return (columns[0] // self.parts, rows) if self.transposed else (rows // self.parts, *columns)

    def stack_size(self, size: tuple[int, ...], num_experts: int) -> tuple[int, ...]:
        """Return the shape of a stack of ``num_experts`` experts, from the shape ``size`` of one expert's tensor."""
        rows = self.parts * size[0]
        return (num_experts, size[1], rows) if self.transposed else (num_experts, rows, *size[1:])

    def view(self, stack: torch.Tensor) -> torch.Tensor:
        """Return the expert's tensor as a view of the stack."""
        matrix = stack[self.expert]
        part = matrix.chunk(self.parts, dim=int(self.transposed))[self.part]
        return part.t() if self.transposed else part


def is_stack(name: str, names: ExpertNames) -> bool:
    """Return whether ``name`` names a stack of experts. ``names``: the family's names of experts and stacks."""
    within, _, last = name.rpartition(".")
    return last in names.stacked and within.endswith(".experts")


def _last_parts(stack: str, names: ExpertNames) -> tuple[str, ...]:
    """Return the last components of the names of an expert's tensors in a stack.

    stack: the last component of the stack's name.

    Example: gate_up_proj of llama4_text → ("gate_proj.weight", "up_proj.weight").
    """
    if not (names.transposed or names.halved):
        return (stack,)
    matrices = (names.gate, names.up) if stack == "gate_up_proj" else (names.down,)
    return tuple(f"{matrix}.weight" for matrix in matrices)


def slices_of(stack: str, expert: int, names: ExpertNames) -> Iterator[tuple[str, Slice]]:
    """Yield (name, ``Slice``) for each tensor of expert number ``expert`` in the stack named ``stack``.

    Example: ``x.experts.down_proj`` of gpt_oss, 3 → ``x.experts.3.down_proj``.
    """
    within, _, last = stack.rpartition(".")
    parts = _last_parts(last, names)
    for number, part in enumerate(parts):
        yield f"{within}.{expert}.{part}", Slice(stack, expert, number, len(parts), names.transposed)


def slice_of(name: str, names: ExpertNames | None) -> Slice | None:
    """Return the ``Slice`` that locates the expert's tensor ``name`` in its stack; the inverse of ``slices_of``.

    None if ``name`` is no tensor of a stacked expert, or if ``names`` is None (a family without
    stacks).
    """
    found = _EXPERT.fullmatch(name) if names is not None else None
    if found is None:
        return None
    within, expert, last = found.groups()
    for stack in names.stacked:
        if last in _last_parts(stack, names):
            return dict(slices_of(f"{within}.{stack}", int(expert), names))[name]
    return None


def joined_plan(planned: Iterable[Planned], family: str) -> list[Planned]:
    """Return the tensors to write to files: ``planned``, with each stack in place of its experts' tensors.

    planned: the tensors to write, one or more per expert. The tensors of one stack follow one
        another, by the experts' numbers.
    family: a config's ``model_type``.
    """
    names = stacking(family)
    joined: list[Planned] = []
    for tensor in planned:
        own = slice_of(tensor.name, names)
        if own is None:
            joined.append(tensor)
            continue
        if (own.expert, own.part) == (0, 0):
            parts = own.parts if own.transposed else 0
            joined.append(replace(tensor, name=own.stack, slices=(), parts=parts))
        last, expected = joined[-1], own.expert * own.parts + own.part
        assert last.name == own.stack and len(last.slices) == expected, f"{tensor.name} comes after {last.name}"
        size = own.stack_size(tensor.shape, own.expert + 1)
        joined[-1] = replace(last, shape=size, slices=(*last.slices, tensor.name))
    return joined


def slices(tensors: Iterable[tuple[str, torch.Tensor]], family: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of ``tensors``; a stack is replaced by views, one for each tensor of each expert.

    family: a config's ``model_type``.
    """
    names = stacking(family)
    for name, tensor in tensors:
        if names is not None and is_stack(name, names):
            for expert in range(len(tensor)):
                yield from ((own, place.view(tensor)) for own, place in slices_of(name, expert, names))
        else:
            yield name, tensor


def copies(tensors: Iterable[tuple[str, torch.Tensor]], family: str, num_experts: int) -> dict[str, torch.Tensor]:
    """Return {name in a checkpoint's files: copy in host memory}, with the tensors of experts put into their stacks.

    tensors: (name, tensor) in any order; a tensor is valid until the next one is asked for.
    family: a config's ``model_type``.
    num_experts: the number of experts in a stack.
    """
    names = stacking(family)
    held: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        own = slice_of(name, names)
        if own is None:
            held[name] = tensor.to("cpu", copy=True)
            continue
        if own.stack not in held:
            held[own.stack] = torch.empty(own.stack_size(tuple(tensor.shape), num_experts), dtype=tensor.dtype)
        own.view(held[own.stack]).copy_(tensor)
    return held


class ExpertOfStack:
    """Reads slices of one expert's tensor from a stack in a file.

    stack: safetensors' slice object (``get_slice``) of the stack.
    place: the ``Slice`` that says where the expert's tensor lies in the stack.
    """

    def __init__(self, stack, place: Slice):
        self.stack, self.place = stack, place

    def get_shape(self) -> list[int]:
        return list(self.place.size(self.stack.get_shape()))

    def get_dtype(self) -> str:
        return self.stack.get_dtype()

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        index = index if isinstance(index, tuple) else (index,)
        size = self.get_shape()
        if not self.place.transposed:
            rows = slice(*index[0].indices(size[0]))
            first = self.place.part * size[0]
            return self.stack[(self.place.expert, slice(first + rows.start, first + rows.stop), *index[1:])]
        rows, columns = (slice(*x.indices(n)) for x, n in zip((*index, slice(None))[:2], size, strict=True))
        first = self.place.part * size[0]
        return self.stack[self.place.expert, columns, slice(first + rows.start, first + rows.stop)].t()


def unstacked(
    files: Mapping[str, pathlib.Path],
    opened: Callable[[pathlib.Path], Any],
    names: ExpertNames,
    folder: pathlib.Path,
) -> tuple[dict[str, pathlib.Path], dict[str, Callable[[], ExpertOfStack | PackedExpert]]]:
    """Return ({tensor name: file}, {expert's tensor name: function}) of files that hold stacks of experts.

    The first mapping has all tensors, with each stack replaced by its experts' tensors. The second
    has the experts' tensors alone, each with a function without arguments that returns its reader.

    files: {tensor name: file}, with the names in the files.
    opened: called with a file; returns safetensors' handle of the file.
    names: the family's names of experts and stacks.
    folder: the model folder, for messages.
    """
    apart: dict[str, pathlib.Path] = {}
    views: dict[str, Callable[[], ExpertOfStack | PackedExpert]] = {}
    packed_scales: set[str] = set()
    for name, file in files.items():
        stack = name.removesuffix(BLOCKS)
        if name != stack and is_stack(stack, names) and f"{stack}{SCALES}" in files:
            packed_scales.add(f"{stack}{SCALES}")
            _check_packed(*_packed(stack, files, opened), stack, folder)
            view = partial(_packed_expert, stack, files, opened)
        elif is_stack(name, names):
            view = partial(_expert, file, opened)
        else:
            apart[name] = file
            continue
        for expert in range(opened(file).get_slice(name).get_shape()[0]):
            for own, place in slices_of(stack, expert, names):
                views[own], apart[own] = partial(view, place), file
    return {name: file for name, file in apart.items() if name not in packed_scales}, views


def _expert(file: pathlib.Path, opened: Callable[[pathlib.Path], Any], place: Slice) -> ExpertOfStack:
    return ExpertOfStack(opened(file).get_slice(place.stack), place)


def _packed_expert(
    stack: str, files: Mapping[str, pathlib.Path], opened: Callable[[pathlib.Path], Any], place: Slice
) -> PackedExpert:
    return PackedExpert(*_packed(stack, files, opened), place.expert)


def _packed(stack: str, files: Mapping[str, pathlib.Path], opened: Callable[[pathlib.Path], Any]) -> tuple[Any, Any]:
    """Return safetensors' slice objects of the blocks and of the scales of a stack in MXFP4."""
    blocks, scales = (opened(files[x]).get_slice(x) for x in (f"{stack}{BLOCKS}", f"{stack}{SCALES}"))
    return blocks, scales


def _check_packed(blocks: Any, scales: Any, stack: str, folder: pathlib.Path) -> None:
    """Raise ConfigError unless a stack in MXFP4 has one byte of scale for each group of 32 numbers.

    blocks, scales: as ``_packed`` returns them.
    """
    wanted = ("U8", tuple(blocks.get_shape()[:-1]))
    actual = (scales.get_dtype(), tuple(scales.get_shape()))
    if len(wanted[1]) != 3 or blocks.get_shape()[-1] != GROUP // 2 or actual != wanted or blocks.get_dtype() != "U8":
        raise ConfigError(
            f"{stack}{SCALES} in {folder} is {actual[0]} of shape {actual[1]}; blocks, {blocks.get_dtype()} of "
            f"{tuple(blocks.get_shape())}, of [experts, rows, groups, {GROUP // 2}] want {wanted[0]} of {wanted[1]}"
        )

"""Tensors of files that stack all experts of a layer ↔ one tensor per expert, the way the package passes them on.

gpt_oss has four such tensors in a layer, ``…mlp.experts.gate_up_proj`` [experts, hidden, 2 · ffn] for one. An expert's
slice goes by ``…mlp.experts.<expert>.gate_up_proj``, a name that vLLM reads too (0.32 ``models/gpt_oss.py``,
``_try_load_streamed_expert``): so nobody holds a stack to load, send or convert an expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from megatron_rl.weights.families.register import FAMILIES
from megatron_rl.weights.shards import Planned

BLOCKS, SCALES = "_blocks", "_scales"  # ends of the names of a stack in MXFP4 (weights/mxfp4.py)
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")


def stacked_names(family: object) -> tuple[str, ...]:
    """Return the last parts of the names of a family's stacks; none for a family whose files have a tensor each."""
    experts = FAMILIES[family].experts if isinstance(family, str) and family in FAMILIES else None
    return experts.stacked if experts is not None else ()


def slice_name(stack: str, expert: int) -> str:
    """Return an expert's name. Example: ``x.experts.down_proj``, 3 → ``x.experts.3.down_proj``."""
    within, _, last = stack.rpartition(".")
    return f"{within}.{expert}.{last}"


def stack_of(name: str, stacked: tuple[str, ...]) -> tuple[str, int] | None:
    """Return the stack and the expert of an expert's name; None for another name. The inverse of ``slice_name``."""
    found = _EXPERT.fullmatch(name) if stacked else None
    if found is None or found[3] not in stacked:
        return None
    return f"{found[1]}.{found[3]}", int(found[2])


def is_stack(name: str, stacked: tuple[str, ...]) -> bool:
    """Return whether a name is a stack's."""
    within, _, last = name.rpartition(".")
    return last in stacked and within.endswith(".experts")


def joined_plan(planned: Iterable[Planned], family: str) -> list[Planned]:
    """Return the tensors of files, in order, where some of ``planned`` are experts' slices that come one by one."""
    stacked = stacked_names(family)
    found: list[Planned] = []
    for tensor in planned:
        place = stack_of(tensor.name, stacked)
        if place is None:
            found.append(tensor)
        elif place[1] == 0:
            found.append(replace(tensor, name=place[0], shape=(1, *tensor.shape), slices=(tensor.name,)))
        else:
            last = found[-1]
            assert last.name == place[0] and len(last.slices) == place[1], f"{tensor.name} comes after {last.name}"
            names = (*last.slices, tensor.name)
            found[-1] = replace(last, shape=(len(names), *tensor.shape), slices=names)
    return found


def slices(tensors: Iterable[tuple[str, torch.Tensor]], family: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, and for each stack a view for each expert under its name."""
    stacked = stacked_names(family)
    for name, tensor in tensors:
        if is_stack(name, stacked):
            yield from ((slice_name(name, expert), view) for expert, view in enumerate(tensor))
        else:
            yield name, tensor


def copies(tensors: Iterable[tuple[str, torch.Tensor]], family: str, num_experts: int) -> dict[str, torch.Tensor]:
    """Return copies in host memory under the names of files: experts' slices, in any order, lie in their stacks.

    tensors: each valid until the next one is asked for.
    """
    stacked = stacked_names(family)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        place = stack_of(name, stacked)
        if place is None:
            found[name] = tensor.to("cpu", copy=True)
            continue
        stack, expert = place
        if stack not in found:
            found[stack] = torch.empty(num_experts, *tensor.shape, dtype=tensor.dtype)
        found[stack][expert].copy_(tensor)
    return found

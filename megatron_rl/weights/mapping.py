"""The mapping between Megatron-Core and Hugging Face: parameter names by model family, and shards to whole tensors."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial

import torch

from megatron_rl.weights.entry import Entry, Layout
from megatron_rl.weights.families.register import FAMILIES
from megatron_rl.weights.model_shape import ModelShape

EMBEDDING = Entry(megatron="embedding.word_embeddings.weight", hf=("model.embed_tokens.weight",), layout=Layout.ROWS)
HEAD = Entry(megatron="output_layer.weight", hf=("lm_head.weight",), layout=Layout.ROWS)
TIED_HEAD = Entry(megatron="output_layer.weight", hf=("model.embed_tokens.weight",), layout=Layout.ROWS)
# transformers' reward models have this tensor
VALUE_HEAD = Entry(megatron="output_layer.weight", hf=("score.weight",), layout=Layout.REPLICATED)
FINAL_NORM = Entry(megatron="decoder.final_layernorm.weight", hf=("model.norm.weight",), layout=Layout.REPLICATED)


def layer_entries(shape: ModelShape, layer: int) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of layer ``layer``, except its routed experts'.

    Megatron names are relative to ``decoder.layers.<local>.`` (local: the layer's number in its
    model chunk), Hugging Face names to ``model.layers.<layer>.``.
    """
    family = FAMILIES[shape.family]
    if shape.has_delta_net(layer):
        return family.delta_layer(shape)
    if shape.num_experts and not shape.has_mixture(layer):
        return family.first_layers(shape)
    return family.layer(shape)


def own_experts(shape: ModelShape, expert_size: int, layer: int) -> Iterator[tuple[Entry, ...]]:
    """Yield, for each expert that one rank holds in layer ``layer``, a tuple with an ``Entry`` for each parameter.

    The experts are numbered within the rank. Names are relative as in ``layer_entries``.

    expert_size: the number of expert-parallel ranks.
    """
    family = FAMILIES[shape.family]
    if family.experts is not None and shape.has_mixture(layer):
        from megatron_rl.weights.families.mixture_layer import expert_entries

        of_expert = family.expert_layer or partial(expert_entries, family.experts)
        for expert in range(shape.num_experts // expert_size):
            yield of_expert(shape, expert)


def stage_entries(shape: ModelShape, stage: int, expert_size: int) -> Iterator[Entry]:
    """Yield an ``Entry`` with full names for each parameter of one pipeline stage, in the same order on every rank.

    ``Entry.expert`` counts a rank's own experts, so one entry stands for a different expert on each
    expert-parallel rank. If LM head and embedding are tied and on different stages, the LM head has
    an entry of its own, which is loaded but not exported.

    stage: counts model chunks in the order of the layers: chunk c of pipeline rank r is stage c ·
        PP + r of PP · VPP.
    expert_size: the number of expert-parallel ranks.
    """
    if stage == 0:
        yield EMBEDDING
    for local, layer in enumerate(shape.layers_on(stage)):
        for entries in (layer_entries(shape, layer), *own_experts(shape, expert_size, layer)):
            for entry in entries:
                yield dataclasses.replace(
                    entry,
                    megatron=f"decoder.layers.{local}.{entry.megatron}",
                    hf=tuple(f"model.layers.{layer}.{name}" for name in entry.hf),
                )
    if stage == shape.num_stages - 1:
        yield FINAL_NORM
        yield from FAMILIES[shape.family].last
        if shape.value_head:
            yield VALUE_HEAD
        elif not shape.tied_embeddings:
            yield HEAD
        elif shape.num_stages > 1:
            yield TIED_HEAD


def trained_entries(shape: ModelShape, stage: int, expert_size: int) -> Iterator[Entry]:
    """Yield the entries of ``stage_entries`` except buffers (``Entry.frozen``), which have no gradient."""
    return (entry for entry in stage_entries(shape, stage, expert_size) if not entry.frozen)


def target_entries(shape: ModelShape, layer: int, expert_size: int) -> tuple[Entry, ...]:
    """Return the ``Entry`` objects of a layer's weights that get LoRA adapters, one rank's experts included.

    Names are relative as in ``layer_entries``. A name in ``lora.targets`` stands for every linear
    layer of that name: linear_fc1 is in a dense MLP, in a shared expert and in each routed expert.

    expert_size: the number of expert-parallel ranks.
    """
    experts = (entry for entries in own_experts(shape, expert_size, layer) for entry in entries)
    return tuple(x for x in (*layer_entries(shape, layer), *experts) if target_of(x.megatron) in shape.lora_targets)


def target_of(name: str) -> str:
    """Return the name in ``lora.targets`` of the linear layer that ``name`` is a weight of; "" if it is no weight.

    Example: mlp.experts.linear_fc1.weight3 → linear_fc1.
    """
    linear, _, last = name.rpartition(".")
    return linear.rpartition(".")[2] if re.fullmatch(r"weight\d*", last) else ""


ADAPTER = "_adapter"


def adapter_name(weight: str) -> str:
    """Return the module name of a weight's LoRA adapters, which lie beside the weight's linear layer.

    A grouped linear layer, which holds the weights of several experts, has adapters for each
    expert.

    Examples: mlp.linear_fc1.weight → mlp.linear_fc1_adapter; mlp.experts.linear_fc1.weight3 →
    mlp.experts.linear_fc1_adapter.3.
    """
    linear, _, number = weight.rpartition(".weight")
    return linear + ADAPTER + (f".{number}" if number else "")


def adapted_weight(adapter: str) -> str:
    """Return the name of the weight that the adapter module ``adapter`` belongs to; the inverse of ``adapter_name``."""
    linear, _, number = adapter.rpartition(ADAPTER)
    return f"{linear}.weight{number.removeprefix('.')}"


def pair_entries(weight: Entry) -> Iterator[Entry]:
    """Yield the entries of LoRA's A and B, under PEFT's names, for each Hugging Face tensor of an adapted weight.

    Rows are outputs and columns inputs of a matrix. If the weight is split by rows over tensor
    ranks, A is whole on every rank and B is split by rows. If the weight is split by columns, A is
    split by columns and B is whole. B's rows have the order of the rows in the Hugging Face tensor,
    or for a weight of layout ``GROUPS`` the order of the weight's own rows.

    weight: the ``Entry`` of the adapted weight.
    """
    in_rows, grouped = weight.layout is not Layout.COLUMNS, weight.layout is Layout.GROUPS
    for number, tensor in enumerate(weight.hf):
        projection = tensor.removesuffix(".weight")
        rows_split = Layout.GROUPS if grouped else Layout.GATE_UP
        for side, split, layout in (("A", not in_rows, Layout.COLUMNS), ("B", in_rows, rows_split)):
            yield Entry(
                megatron=f"{adapter_name(weight.megatron)}.{projection.rpartition('.')[2]}_{side}",
                hf=(f"{projection}.lora_{side}.weight",),
                layout=layout if split else Layout.REPLICATED,
                expert=weight.expert,
                groups=weight.groups if split else 0,
                sections=weight.sections[number : number + 1] if split else (),
            )


def adapter_entries(shape: ModelShape, stage: int, expert_size: int) -> Iterator[Entry]:
    """Yield an ``Entry`` for each LoRA matrix of one pipeline stage.

    Hugging Face names are PEFT's without ``base_model.model.``. As in ``stage_entries``, an
    expert's entry stands for one expert on each expert-parallel rank.

    stage, expert_size: as in ``stage_entries``.
    """
    for local, layer in enumerate(shape.layers_on(stage)):
        for entry in (pair for weight in target_entries(shape, layer, expert_size) for pair in pair_entries(weight)):
            yield dataclasses.replace(
                entry, megatron=f"decoder.layers.{local}.{entry.megatron}", hf=(f"model.layers.{layer}.{entry.hf[0]}",)
            )


def hf_size(shape: ModelShape, name: str) -> tuple[int, ...]:
    """Return the shape of the Hugging Face tensor ``name`` in a checkpoint's files, computed from the config alone."""
    if ".lora_" in name:
        projection, _, side = name.removesuffix(".weight").rpartition(".lora_")
        rows, columns = hf_size(shape, f"{projection}.weight")
        return (shape.lora_rank, columns) if side == "A" else (rows, shape.lora_rank)
    kind = name.split("layers.")[-1].split(".", 1)[-1] if ".layers." in name else name
    kind = re.sub(r"^\w+\.experts\.(\d+|\{expert\})\.", "expert.", kind)
    whole: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, shape.hidden_size),
        "lm_head.weight": (shape.vocab_size, shape.hidden_size),
        "score.weight": (1, shape.hidden_size),
    }
    return whole.get(kind) or FAMILIES[shape.family].sizes(shape).get(kind, (shape.hidden_size,))  # the rest are norms


def shard_size(entry: Entry, shape: ModelShape, ranks: int) -> tuple[int, ...]:
    """Return the shape of one rank's shard of a Megatron parameter that is split over ``ranks`` tensor ranks."""
    first = hf_size(shape, entry.hf[0])
    match entry.layout:
        case Layout.REPLICATED:
            return first
        case Layout.ROWS:
            return (shape.padded_vocab_size // ranks, *first[1:])
        case Layout.COLUMNS:
            return (first[0], first[1] // ranks)
        case Layout.QKV | Layout.GATE_UP | Layout.GROUPS:
            return (sum(hf_size(shape, name)[0] for name in entry.hf) // ranks, *first[1:])
        case Layout.SPLIT:
            return (first[0] // ranks,)
        case Layout.INTERLEAVED:
            return (first[-1] // ranks, *first[:-1])
        case Layout.TRANSPOSED:
            return (first[1], first[0] // ranks)


def part_rows(entry: Entry, shape: ModelShape) -> list[tuple[str, int, int]]:
    """Return [(Hugging Face tensor, first row, number of rows)] of q, k, v, or of gate, up, or of sections, in order.

    entry: an entry with layout ``QKV`` (q, k, v), ``GATE_UP`` (gate, up) or ``GROUPS`` (sections).

    Example: one tensor "x" holds q of 4 heads, k and v of 2 heads, all of width 16 → [("x", 0, 64),
    ("x", 64, 32), ("x", 96, 32)].
    """
    if entry.layout is Layout.GROUPS:
        return [
            (name, sum(rows[:i]), each)
            for name, rows in zip(entry.hf, entry.sections, strict=True)
            for i, each in enumerate(rows)
        ]
    if not entry.joined:
        return [(name, 0, hf_size(shape, name)[0]) for name in entry.hf]
    (name,) = entry.hf
    if entry.layout is Layout.GATE_UP:
        rows = [hf_size(shape, name)[0] // 2] * 2
    else:
        rows = [heads * shape.head_dim for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
    return [(name, sum(rows[:i]), each) for i, each in enumerate(rows)]


ReadRows = Callable[[str, int, int, int], torch.Tensor]
"""Reads one slice of a Hugging Face tensor: takes (name, dimension, start, stop), returns the slice alone."""


def shard_reads(entry: Entry, shape: ModelShape, rank: int, ranks: int) -> list[tuple[str, int, int, int]]:
    """Return the slices of Hugging Face tensors that ``load_shard`` reads, as (name, dimension, start, stop).

    They follow from the config alone; nothing is read.

    rank, ranks: this tensor rank, and the number of tensor ranks.
    """
    name, size = entry.hf[0], hf_size(shape, entry.hf[0])
    match entry.layout:
        case Layout.REPLICATED:
            return [(name, 0, 0, size[0])]
        case Layout.GATE_UP | Layout.QKV | Layout.GROUPS:
            shares = [(part, first, rows // ranks) for part, first, rows in part_rows(entry, shape)]
            return [(part, 0, first + rank * x, first + (rank + 1) * x) for part, first, x in shares]
        case Layout.ROWS:
            share = shape.padded_vocab_size // ranks
            start = rank * share
            return [(name, 0, start, max(start, min(start + share, shape.vocab_size)))]
        case Layout.COLUMNS:
            dimension = 1
        case Layout.INTERLEAVED:
            dimension = len(size) - 1
        case Layout.SPLIT | Layout.TRANSPOSED:
            dimension = 0
    share = size[dimension] // ranks
    return [(name, dimension, rank * share, (rank + 1) * share)]


def load_shard(entry: Entry, shape: ModelShape, read: ReadRows, rank: int, ranks: int) -> torch.Tensor:
    """Return this tensor rank's shard of a Megatron parameter, made of slices of Hugging Face tensors.

    read: called with (name, dimension, start, stop); returns that slice of the tensor.
    rank, ranks: this tensor rank, and the number of tensor ranks.
    """
    parts = [read(*each) for each in shard_reads(entry, shape, rank, ranks)]
    match entry.layout:
        case Layout.REPLICATED | Layout.COLUMNS | Layout.SPLIT:
            return parts[0]
        case Layout.GATE_UP:
            return torch.cat(parts)
        case Layout.INTERLEAVED:
            return parts[0].unflatten(-1, (-1, 2)).movedim((-1, -2), (0, 1)).flatten(0, 1)
        case Layout.TRANSPOSED:
            return parts[0].t()
        case Layout.QKV | Layout.GROUPS:
            groups = (entry.groups or shape.num_kv_heads) // ranks
            return torch.cat([x.view(groups, -1, *x.shape[1:]) for x in parts], dim=1).flatten(0, 1)
        case Layout.ROWS:
            (rows,), share = parts, shape.padded_vocab_size // ranks
            if rows.shape[0] == share:
                return rows
            return torch.cat([rows, rows.new_zeros(share - rows.shape[0], *rows.shape[1:])])


def hf_parts(entry: Entry, shape: ModelShape, shards: torch.Tensor) -> Iterator[tuple[str, tuple[torch.Tensor, ...]]]:
    """Yield (name, pieces) for each Hugging Face tensor of a Megatron parameter; the inverse of ``load_shard``.

    Nothing is copied: the pieces are views of ``shards``. Flattened and put one after the other, they
    are the tensor (``laid_out`` does this). There is one piece, or there are several if the tensor
    holds q, k and v, or gate and up (``Entry.joined``). A piece may have more dimensions than the
    tensor.

    shards: [ranks, *shard], the shards of all tensor ranks. The shards need not be adjacent in
        memory, except for layout ``ROWS``.
    """
    match entry.layout:
        case Layout.REPLICATED:
            yield entry.hf[0], (shards[0],)
        case Layout.COLUMNS:
            yield entry.hf[0], (shards.transpose(0, 1),)
        case Layout.SPLIT:
            yield entry.hf[0], (shards,)
        case Layout.INTERLEAVED:  # [ranks, (gate, up), share, …] → […, ranks, share, (gate, up)]
            yield entry.hf[0], (shards.unflatten(1, (2, -1)).movedim((0, 2, 1), (-3, -2, -1)),)
        case Layout.TRANSPOSED:
            yield entry.hf[0], (shards.transpose(1, 2),)
        case Layout.GATE_UP if entry.joined and len(shards) == 1:
            yield entry.hf[0], (shards[0],)
        case Layout.GATE_UP:
            yield from _by_tensor(entry, shards.unflatten(1, (2 if entry.joined else len(entry.hf), -1)).unbind(1))
        case Layout.QKV:
            grouped = shards.unflatten(1, (shape.num_kv_heads // len(shards), -1))
            rows = [rows // shape.num_kv_heads for _, _, rows in part_rows(entry, shape)]
            yield from _by_tensor(entry, grouped.split(rows, dim=2))
        case Layout.GROUPS:
            grouped = shards.unflatten(1, (entry.groups // len(shards), -1))
            pieces = iter(grouped.split([rows // entry.groups for _, _, rows in part_rows(entry, shape)], dim=2))
            for name, rows in zip(entry.hf, entry.sections, strict=True):
                yield name, tuple(itertools.islice(pieces, len(rows)))
        case Layout.ROWS:
            yield entry.hf[0], (shards.view(-1, *shards.shape[2:])[: shape.vocab_size],)


def _by_tensor(entry: Entry, parts: tuple[torch.Tensor, ...]) -> Iterator[tuple[str, tuple[torch.Tensor, ...]]]:
    if entry.joined:
        yield entry.hf[0], parts
    else:
        yield from ((name, (part,)) for name, part in zip(entry.hf, parts, strict=True))


def is_copied(layout: Layout, ranks: int) -> bool:
    """Return whether ``laid_out`` copies tensors of this layout, because their elements lie out of order in the shards.

    ranks: the number of tensor ranks that the parameter is split over.
    """
    return layout in (Layout.QKV, Layout.GROUPS, Layout.INTERLEAVED, Layout.TRANSPOSED) or (
        ranks > 1 and layout in (Layout.COLUMNS, Layout.GATE_UP, Layout.SPLIT)
    )


def laid_out(parts: tuple[torch.Tensor, ...], size: tuple[int, ...], spare: torch.Tensor) -> torch.Tensor:
    """Return the Hugging Face tensor of shape ``size`` that ``parts`` make up, in order.

    The result is a view if there is a single, contiguous part. Otherwise it is a copy in
    ``spare``.

    parts: views of the shards, as ``hf_parts`` yields them for the tensor.
    spare: one dimension; if a copy is needed, it has at least the tensor's number of elements.
    """
    if len(parts) == 1 and parts[0].is_contiguous():
        return parts[0].view(size)
    start = 0
    for part in parts:
        spare[start : start + part.numel()].view(part.shape).copy_(part)
        start += part.numel()
    return spare[:start].view(size)


def merge_shards(entry: Entry, shape: ModelShape, shards: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Return [(name, tensor)] of the Hugging Face tensors of a Megatron parameter, copied if the layout needs it.

    shards: the parameter's shard on each tensor rank, in order.
    """
    stacked = shards[0][None] if len(shards) == 1 else torch.stack(shards)
    return [
        (name, laid_out(parts, hf_size(shape, name), stacked.new_empty(sum(part.numel() for part in parts))))
        for name, parts in hf_parts(entry, shape, stacked)
    ]
